#!/usr/bin/env bash
# Tests of what is installed and of how the folders depend on each other; CMakeLists.txt beside it calls it.
#     package.sh install   BUILD PREFIX             installs the build into an empty prefix
#     package.sh headers   PREFIX                   every installed header compiles alone, as C11 and as C++17
#     package.sh symbols   LIBRARY SONAME           the library exports only cpa_ symbols and is called SONAME
#     package.sh cmake     SOURCE PREFIX WORK       the examples build and run through find_package(cpattn)
#     package.sh pkgconfig SOURCE PREFIX LIBDIR WORK    and through pkg-config
#     package.sh includes  SOURCE                   the folders include only what they may
# The environment gives CC, CXX, CMAKE and MPIRUN (with its options, -np excepted).
set -euo pipefail

fail() {
    echo "package.sh: $*" >&2
    exit 1
}

install_package() { # BUILD PREFIX
    rm -rf "$2"
    "$CMAKE" --install "$1" --prefix "$2"
}

headers_compile_alone() { # PREFIX
    local warnings=(-Wall -Wextra -Werror -pedantic) mpi header name n=0
    read -ra mpi <<<"$(pkg-config --cflags ompi-c | sed 's/-I/-isystem /g')"
    for header in "$1"/include/cpattn/*.h; do
        name=cpattn/$(basename "$header")
        printf '#include <%s>\n#include <%s>\n' "$name" "$name" >header.c
        "$CC" -std=c11 "${warnings[@]}" -I"$1/include" "${mpi[@]}" -fsyntax-only header.c || fail "$name as C11"
        "$CXX" -x c++ -std=c++17 "${warnings[@]}" -I"$1/include" "${mpi[@]}" -fsyntax-only header.c ||
            fail "$name as C++17"
        n=$((n + 1))
    done
    [ "$n" -ge 7 ] || fail "only $n headers installed"
    echo "$n headers compile alone"
}

symbols_are_ours() { # LIBRARY SONAME
    local exported stray
    exported=$(nm -D --defined-only "$1" | awk '{ print $NF }')
    stray=$(grep -v '^cpa_' <<<"$exported" || true)
    [ -z "$stray" ] || fail "exported but not cpa_:" $stray
    grep -qx cpa_engine_run <<<"$exported" || fail "cpa_engine_run is not exported"
    readelf -d "$1" | grep -q "SONAME.*\[$2\]" || fail "soname is not $2"
    echo "$(wc -l <<<"$exported") symbols, all cpa_"
}

run_examples() { # WORK
    "$1/operators"
    $MPIRUN -np 1 "$1/context"
    $MPIRUN -np 3 "$1/context"
    $MPIRUN -np 2 "$1/engine"
}

examples_through_cmake() { # SOURCE PREFIX WORK
    rm -rf "$3"
    "$CMAKE" -S "$1/docs/examples" -B "$3" -DCMAKE_PREFIX_PATH="$2" -DCMAKE_C_COMPILER="$CC" -DCMAKE_BUILD_TYPE=Release
    "$CMAKE" --build "$3"
    run_examples "$3"
}

examples_through_pkgconfig() { # SOURCE PREFIX LIBDIR WORK
    local flags example
    export PKG_CONFIG_PATH=$2/$3/pkgconfig LD_LIBRARY_PATH=$2/$3
    read -ra flags <<<"$(pkg-config --cflags --libs cpattn)"
    rm -rf "$4" && mkdir -p "$4"
    for example in operators context engine; do
        "$CC" -std=c11 -O2 -Wall -Wextra -Werror "$1/docs/examples/$example.c" -o "$4/$example" "${flags[@]}" -lm
    done
    run_examples "$4"
}

# may_not_include FOLDER PATTERN: no file of the folder includes a path that matches the pattern.
may_not_include() {
    local found
    found=$(grep -rnE "^ *# *include *[<\"]($2)" --include='*.[ch]' --include='*.h.in' --include='*.cu' --include='*.cuh' "$1" || true)
    [ -z "$found" ] || fail "$1 may not include this:"$'\n'"$found"
}

folders_include_what_they_may() { # SOURCE
    cd "$1"
    local rest='launcher/|bench/|tests/'
    may_not_include include "base/|kernels/|comm/|src/|$rest"
    may_not_include base "kernels/|comm/|src/|$rest"
    may_not_include kernels "comm/|src/|mpi\.h|$rest"
    may_not_include comm "kernels/|src/|$rest"
    may_not_include src "$rest"
    may_not_include launcher 'tests/'
    may_not_include bench 'tests/'
    may_not_include docs/examples "base/|kernels/|comm/|src/|$rest"
    may_not_include kernels/host 'kernels/cuda/'
    may_not_include kernels/cuda 'kernels/host/'
    may_not_include comm/mpi 'comm/(device|nccl|peer)/'
    may_not_include comm/nccl 'comm/(mpi|peer)/'
    may_not_include comm/device 'comm/(nccl|peer)/'
    # engine -> check -> model, worker -> context -> trace; engine, check, worker -> schedule -> cache.
    may_not_include src/ops 'src/(cache|schedule|trace|context|worker|model|check|engine)/'
    may_not_include src/trace 'src/(ops|cache|schedule|context|worker|model|check|engine)/'
    may_not_include src/cache 'src/(trace|context|worker|model|check|engine)/'
    may_not_include src/schedule 'src/(ops|trace|context|worker|model|check|engine)/|comm/|kernels/|mpi\.h'
    may_not_include src/context 'src/(cache|schedule|worker|model|check|engine)/'
    may_not_include src/model 'src/(cache|schedule|context|worker|check|engine)/'
    may_not_include src/worker 'src/(model|check|engine)/'
    may_not_include src/check 'src/engine/'
    # A header that is installed includes only headers that are.
    local header
    for header in $(grep -rhoE '<cpattn/[^>]*>' include | tr -d '<>' | sort -u); do
        [ -f "include/$header" ] || fail "<$header> is included but not installed"
    done
    echo "every folder includes only what it may"
}

command=${1:-}
shift || true
case $command in
    install) install_package "$@" ;;
    headers) headers_compile_alone "$@" ;;
    symbols) symbols_are_ours "$@" ;;
    cmake) examples_through_cmake "$@" ;;
    pkgconfig) examples_through_pkgconfig "$@" ;;
    includes) folders_include_what_they_may "$@" ;;
    *) fail "unknown command '$command'" ;;
esac
