/* One way to write a Jinja template, so that templates which differ only in how they are written can be told to be
 * the same: outside of quotes nothing is between words; "message.role" is message['role']; quotes are single; a line
 * end inside quotes is \n; 'a' + 'b' is 'ab'; tags have no "-"; a line end behind what is put out stays, as it is
 * part of it. */
#ifndef CPA_TEXT_JINJA_FORM_H
#define CPA_TEXT_JINJA_FORM_H

#include "src/text/bytes.h"

/* Adds the form of a template, with a zero at its end; 0 without memory, else 1. */
int cpa_jinja_form(const char *template_text, cpa_bytes *out);

#endif
