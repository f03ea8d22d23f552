/* The text of jinja_child.py, which is built into the program. */
#ifndef CPA_TEXT_JINJA_CHILD_PY_H
#define CPA_TEXT_JINJA_CHILD_PY_H

#include <stddef.h>

extern const unsigned char cpa_jinja_child_py[];
extern const size_t cpa_jinja_child_py_bytes;

#endif
