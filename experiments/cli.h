/* What every subcommand of kvlab shares: the command table, argp parsing with the common options, devices.
 *
 * A subcommand is one file cmd_<name>.c with one function `kv_status kv_cmd_<name>(int argc, char **argv)`. argv[0] is
 * "kvlab <name>". It parses with kv_cli_parse, checks its values (KV_E_USAGE), works, prints its table on stdout, and returns a
 * status: main prints the recorded message and turns the status into the exit code. */
#ifndef KV_EXPERIMENTS_CLI_H
#define KV_EXPERIMENTS_CLI_H

#include <argp.h>

#include "reference/core/status.h"
#include "reference/ops.h"

/* argp_parse with the options every command has: -q, -v, -vv, --threads N. argp itself ends the process for --help (0) and for
 * misuse (64). Values that argp cannot judge are stored as text by `argp->parser` and checked by the caller afterwards. */
kv_status kv_cli_parse(const struct argp *argp, int argc, char **argv, void *input);

/* "cpu" or "gpu" -> device table; KV_E_UNAVAILABLE explains what is missing for "gpu", KV_E_USAGE for other words. */
kv_status kv_cli_device(const char *name, const kv_ops **out);

/* Folder with the executable's repository (policies/weights, traces/model, plots lie below it); a static string. */
const char *kv_cli_home(void);

/* The command line as typed, quoted for a shell (reproducer of the manifest); a static string set by main. */
const char *kv_cli_command_line(void);
void kv_cli_remember(int argc, char **argv);

kv_status kv_cmd_record(int argc, char **argv);
kv_status kv_cmd_experiment(int argc, char **argv);
kv_status kv_cmd_train(int argc, char **argv);
kv_status kv_cmd_evaluate(int argc, char **argv);
kv_status kv_cmd_verify(int argc, char **argv);
kv_status kv_cmd_bench(int argc, char **argv);
kv_status kv_cmd_inspect(int argc, char **argv);
kv_status kv_cmd_policies(int argc, char **argv);

#endif
