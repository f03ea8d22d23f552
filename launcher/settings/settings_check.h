/* What settings must hold together, when each is within its own bounds. */
#ifndef CPA_LAUNCHER_SETTINGS_CHECK_H
#define CPA_LAUNCHER_SETTINGS_CHECK_H

#include "launcher/settings/settings.h"
#include "launcher/settings/sparse_prompts.h"
#include "launcher/settings/speculative.h"
#include "program/metrics_options.h"

/* CPA_INVALID, and one line, if a setting needs another, or a subcommand, that is not there, or excludes one that
 * is. */
cpa_status cpa_settings_check(const cpa_settings *settings, cpa_error *err);

/* Whether a setting has a meaning in the run, the server or the generation that the settings are of. */
int cpa_setting_is_of_command(const cpa_settings *settings, const cpa_field *field);

/* What is to be known of latencies: --percentiles and --goodput. Loaded settings are right in that. */
cpa_status cpa_settings_metrics(const cpa_settings *settings, cpa_metrics_options *out, cpa_error *err);

/* Who drafts: --speculative. Loaded settings are right in that, too. */
cpa_status cpa_settings_speculative(const cpa_settings *settings, cpa_speculative *out, cpa_error *err);
/* What prompts attend: --sparse. Loaded settings are right in that, too. */
cpa_status cpa_settings_sparse(const cpa_settings *settings, cpa_sparse_prompts *out, cpa_error *err);

#endif
