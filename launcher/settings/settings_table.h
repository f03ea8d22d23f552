/* The rows of the settings: name, type, bounds, default and help of each. */
#ifndef CPA_LAUNCHER_SETTINGS_TABLE_H
#define CPA_LAUNCHER_SETTINGS_TABLE_H

#include "launcher/settings/settings.h"

/* Groups that belong to a subcommand alone. */
#define CPA_SETTINGS_GENERATE "Generate, with --seed"
#define CPA_SETTINGS_SERVE "Serve"

/* In the order of --help. */
extern const cpa_field cpa_settings_rows[];
extern const int cpa_settings_n_rows;

/* The row of a name that is in the table. */
int cpa_settings_index(const char *name);

/* Whether something other than the default has set the setting of that name. */
int cpa_settings_given(const cpa_settings *settings, const char *name);

/* The environment variable of a setting: CPATTN_BLOCK_SIZE for "block-size". */
#define CPA_VARIABLE_PREFIX "CPATTN_"
void cpa_setting_variable(const cpa_field *field, char *out, size_t bytes);

/* Which is no setting: the secret of a job whose ranks are started by hand. */
#define CPA_JOB_SECRET_VARIABLE CPA_VARIABLE_PREFIX "JOB_SECRET"

/* Whether the setting asks the program for something else than a run, as --help does; a file cannot set it. */
int cpa_setting_is_action(const cpa_field *field);

#endif
