#include "program/parent.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

pid_t cpa_parent_of_mpi(void) {
    static const char *const names[] = {"mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "prte"};
    const pid_t parent = getppid();
    char path[64], name[32] = "";
    snprintf(path, sizeof path, "/proc/%d/comm", (int)parent);
    FILE *file = fopen(path, "r");
    if (file && !fgets(name, sizeof name, file)) name[0] = 0;
    if (file) fclose(file);
    name[strcspn(name, "\n")] = 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(name, names[i]) == 0) return parent;
    }
    return 0;
}
