#!/usr/bin/env bash
# Tests of what is installed and of how the folders depend on each other; CMakeLists.txt beside it calls it.
#     package.sh install   BUILD PREFIX             installs the build into an empty prefix
#     package.sh uninstall BUILD PREFIX             what was installed there is gone after the target uninstall
#     package.sh debian    SOURCE VERSION           debian/ has the version of the project, and needs what quickstart installs
#     package.sh dpkg      SOURCE WORK              Debian's packages build from the tree, and the program of theirs answers
#     package.sh built     SOURCE BUILD             what ./quickstart builds is all that is installed
#     package.sh manual    PREFIX                   a page a command, with each option of its --help
#     package.sh headers   PREFIX                   every installed header compiles alone, as C11, C++11 and C++17
#     package.sh symbols   PREFIX LIBRARY SONAME    the library exports what the headers declare, and is called SONAME
#     package.sh llm       PREFIX LIBRARY SONAME    so does libcpattn_llm, which has the engine from libcpattn
#     package.sh no_mpi    PREFIX LIBDIR            MPI is loaded by libcpattn_mpi and named by cpattn/mpi.h alone
#     package.sh loads     LIBRARY                  it loads no library that only the program stands on
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
    local manifest=$1/install_manifest.txt
    rm -rf "$2"
    # That of an installation of the user's, which the test's would replace; uninstall_package puts it back.
    [ ! -e "$manifest" ] || [ -e "$manifest.kept" ] || cp "$manifest" "$manifest.kept"
    "$CMAKE" --install "$1" --prefix "$2"
}

uninstall_package() { # BUILD PREFIX
    local left
    [ -x "$2/bin/cp_attn" ] || fail "nothing is installed in $2"
    touch "$2/share/kept"
    "$CMAKE" --build "$1" --target uninstall
    [ ! -e "$1/install_manifest.txt.kept" ] || mv "$1/install_manifest.txt.kept" "$1/install_manifest.txt"
    left=$(find "$2" ! -type d)
    [ "$left" = "$2/share/kept" ] || fail "besides $2/share/kept this is left:"$'\n'"$left"
    [ ! -d "$2/include/cpattn" ] || fail "$2/include/cpattn is left"
    [ -d "$2/bin" ] || fail "$2/bin is gone, which others may use"
}

debian_agrees_with_the_project() { # SOURCE VERSION
    local version package needed
    version=$(sed -n '1s/^cpattn (\(.*\)) .*/\1/p' "$1/debian/changelog")
    [ "$version" = "$2" ] || fail "debian/changelog is of version $version, the project of $2"
    needed=$(awk '/^Build-Depends:/ { sub(/^[^:]*:/, ""); on = 1; print; next } on && /^ / { print; next } { on = 0 }' \
        "$1/debian/control" | tr ',' '\n' | sed 's/(.*//; s/ //g' | grep .)
    for package in $needed; do
        grep -qE "(^|[ (])$package($|[ )])" <(sed -n '/^packag/,/)$/p' "$1/quickstart") ||
            [ "$package" = debhelper-compat ] || fail "Build-Depends: quickstart does not install $package"
    done
    echo "$(wc -w <<<"$needed") packages to build with, all installed by quickstart"
}

debian_packages_build() { # SOURCE WORK
    local name
    (cd "$1" && dpkg-checkbuilddeps) || { echo "skipped: what dpkg-buildpackage needs is not installed" && exit 77; }
    rm -rf "$2" && mkdir -p "$2/tree"
    tar -C "$1" --exclude=./build --exclude=./.git --exclude=./cp_attn -c . | tar -C "$2/tree" -x
    (cd "$2/tree" && CPATTN_CUDA=OFF dpkg-buildpackage -b -us -uc)
    for name in cp-attn libcpattn0 libcpattn-mpi0 libcpattn-llm0 libcpattn-dev; do
        dpkg -x "$2/${name}"_*.deb "$2/root" || fail "no package $name"
    done
    "$2/root/usr/bin/cp_attn" --version
    ! readelf -d "$2"/root/usr/lib/*/libcpattn.so.0 | grep libmpi || fail "libcpattn0 loads MPI"
    for name in man/man1/cp_attn-serve.1.gz cpattn/configs/small.yaml bash-completion/completions/cp_attn \
        zsh/vendor-completions/_cp_attn fish/vendor_completions.d/cp_attn.fish; do
        [ -e "$2/root/usr/share/$name" ] || fail "/usr/share/$name is not packaged"
    done
    rm -rf "$2/tree"
}

quickstart_builds_what_is_installed() { # SOURCE BUILD
    local target commands file n=0
    target=$(sed -n 's/^ *"") .* build release --target \([a-z_]*\);.*/\1/p' "$1/quickstart")
    [ -n "$target" ] || fail "quickstart names no target"
    commands=$(ninja -C "$2" -t commands "$target")
    while read -r file; do
        grep -q -- " -o ${file#"$2"/}" <<<"$commands" || fail "quickstart does not build $file"
        n=$((n + 1))
    done < <(find "$2" -path "$2/tests" -prune -o -name cmake_install.cmake -exec cat {} + |
        sed -n 's/.*TYPE \(SHARED_LIBRARY\|EXECUTABLE\) .*FILES.* "\([^"]*\)".*/\2/p')
    [ "$n" -ge 2 ] || fail "only $n built files are installed"
    echo "quickstart builds the $n files that are installed"
}

pages_have_what_help_has() { # PREFIX
    local page words option pages=0 options=0
    [ -d "$1/share/man" ] || { echo "skipped: built without help2man, so there are no pages" && exit 77; }
    for page in "$1"/share/man/man1/*.1; do
        words=$(basename "$page" .1 | tr - ' ')
        grep -q '^\.SH SYNOPSIS' "$page" || fail "$page has no synopsis"
        grep -qE "^$(basename "$page" .1) .?- " "$page" || fail "$page has no name: $(sed -n '/SH NAME/{n;p}' "$page")"
        # shellcheck disable=SC2086
        for option in $("$1/bin/"$words --help | sed -n 's/^  \(--[^ ]*\).*/\1/p'); do
            grep -qF -- "\\fB${option//-/\\-}\\fR" "$page" || fail "$page says nothing of $option"
            options=$((options + 1))
        done
        pages=$((pages + 1))
    done
    [ "$pages" = 7 ] || fail "$pages pages, expected one for each of 7 commands"
    echo "$pages pages with $options options"
}

headers_compile_alone() { # PREFIX
    local warnings=(-Wall -Wextra -Werror -pedantic) mpi header name standard n=0
    for header in "$1"/include/cpattn/*.h; do
        name=cpattn/$(basename "$header") mpi=()
        [ "$name" != cpattn/mpi.h ] || read -ra mpi <<<"$(pkg-config --cflags ompi-c)"
        printf '#include <%s>\n#include <%s>\ntypedef int one_declaration;\n' "$name" "$name" >header.c
        "$CC" -std=c11 "${warnings[@]}" -I"$1/include" "${mpi[@]}" -fsyntax-only header.c || fail "$name as C11"
        for standard in c++11 c++17; do
            "$CXX" -x c++ -std=$standard "${warnings[@]}" -I"$1/include" "${mpi[@]}" -fsyntax-only header.c ||
                fail "$name as $standard"
        done
        n=$((n + 1))
    done
    [ "$n" -ge 9 ] || fail "only $n headers installed"
    echo "$n headers compile alone"
}

# Every function that the headers of PREFIX declare, or define inline: a name before a parenthesis outside of braces.
declared_functions() { # PREFIX HEADER
    echo "#include <cpattn/$2.h>" | "$CC" -std=c11 -E -I"$1/include" - | awk '
        /^#/ { ours = index($0, "/cpattn/") > 0; next }
        !ours { next }
        { line = $0
          while (match(line, /[{}]|cpa_[a-z0-9_]+ *\(/)) {
              found = substr(line, RSTART, RLENGTH)
              line = substr(line, RSTART + RLENGTH)
              if (found == "{") depth++
              else if (found == "}") depth--
              else if (depth == 0) { sub(/ *\(/, "", found); print found }
          } }' | sort -u
}

exported_functions() { # LIBRARY
    nm -D --defined-only "$1" | awk '$2 != "A" { sub(/@.*/, "", $NF); print $NF }' | sort -u
}

exports_what_headers_declare() { # PREFIX LIBRARY SONAME
    local exported declared difference
    exported=$(exported_functions "$2")
    declared=$(declared_functions "$1" cpattn)
    difference=$(comm -3 <(echo "$exported") <(echo "$declared"))
    [ -z "$difference" ] || fail "exported but not declared, or (indented) the other way round:"$'\n'"$difference"
    grep -qx cpa_shard_len <<<"$exported" || fail "cpa_shard_len is not exported"
    readelf -d "$2" | grep "SONAME.*\[$3\]" >/dev/null || fail "soname is not $3"
    echo "$(wc -l <<<"$exported") symbols, as declared"
}

llm_exports_what_its_header_declares() { # PREFIX LIBRARY SONAME
    local difference declared
    declared=$(comm -13 <(declared_functions "$1" cpattn) <(declared_functions "$1" llm))
    difference=$(comm -3 <(exported_functions "$2") <(echo "$declared"))
    [ -z "$difference" ] || fail "exported but not declared, or (indented) the other way round:"$'\n'"$difference"
    nm -D --undefined-only "$2" | grep cpa_engine_create >/dev/null || fail "$2 has an engine of its own"
    readelf -d "$2" | grep "SONAME.*\[$3\]" >/dev/null || fail "soname is not $3"
    echo "$(wc -l <<<"$declared") symbols, as declared"
}

only_its_own_library_needs_mpi() { # PREFIX LIBDIR
    local named
    export LD_LIBRARY_PATH=$2
    ldd "$2/libcpattn_mpi.so" | grep libmpi >/dev/null || fail "libcpattn_mpi.so does not load MPI"
    ! ldd "$2/libcpattn.so" | grep libmpi || fail "libcpattn.so loads MPI"
    ! ldd "$2/libcpattn_llm.so" | grep libmpi || fail "libcpattn_llm.so loads MPI"
    named=$(grep -lE '#include <mpi\.h>|MPI_' "$1"/include/cpattn/*.h | xargs -n 1 basename | tr '\n' ' ')
    [ "$named" = "mpi.h " ] || fail "MPI is named by $named, expected mpi.h alone"
    echo "MPI is in libcpattn_mpi alone"
}

# What only the program stands on (text, HTTP, its files) is none of the library's.
loads_little() { # LIBRARY
    local others
    others=$(readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        grep -vE '^(lib(c|m|pthread|dl|rt|crypto|gcc_s|gcov|asan|ubsan|tsan)|ld-linux.*)\.so' || true)
    [ -z "$others" ] || fail "libcpattn.so loads $others"
    echo "libcpattn.so loads the system's libraries and libcrypto alone"
}

# Ranks that the shell starts, without MPI.
run_ranks() { # N PROGRAM
    local rank pids=()
    export WORLD_SIZE=$1 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 10000))
    for ((rank = 0; rank < $1; rank++)); do
        RANK=$rank "$2" &
        pids+=($!)
    done
    for rank in "${pids[@]}"; do wait "$rank"; done
    unset WORLD_SIZE MASTER_ADDR MASTER_PORT
}

run_examples() { # SOURCE WORK
    local folder=$1/tests/data/tiny-llama
    shift
    "$1/operators"
    "$1/varlen"
    "$1/context"
    run_ranks 3 "$1/context"
    ! ldd "$1/context" | grep libmpi || fail "the context example loads MPI"
    "$1/llm" "$folder" Hello | grep -x '24 tokens (length) after [0-9]* of the prompt' || fail "the llm example answers otherwise"
    $MPIRUN -np 2 "$1/engine"
}

examples_through_cmake() { # SOURCE PREFIX WORK
    rm -rf "$3"
    "$CMAKE" -S "$1/docs/examples" -B "$3" -DCMAKE_PREFIX_PATH="$2" -DCMAKE_C_COMPILER="$CC" -DCMAKE_BUILD_TYPE=Release
    "$CMAKE" --build "$3"
    run_examples "$1" "$3"
}

examples_through_pkgconfig() { # SOURCE PREFIX LIBDIR WORK
    local flags mpi_flags llm_flags example
    export PKG_CONFIG_PATH=$2/$3/pkgconfig LD_LIBRARY_PATH=$2/$3
    read -ra flags <<<"$(pkg-config --cflags --libs cpattn)"
    read -ra llm_flags <<<"$(pkg-config --cflags --libs cpattn_llm)"
    read -ra mpi_flags <<<"$(pkg-config --cflags --libs cpattn_mpi)"
    rm -rf "$4" && mkdir -p "$4"
    for example in operators varlen context; do
        "$CC" -std=c11 -O2 -Wall -Wextra -Werror "$1/docs/examples/$example.c" -o "$4/$example" "${flags[@]}" -lm
    done
    "$CC" -std=c11 -O2 -Wall -Wextra -Werror "$1/docs/examples/llm.c" -o "$4/llm" "${llm_flags[@]}"
    "$CC" -std=c11 -O2 -Wall -Wextra -Werror "$1/docs/examples/engine.c" -o "$4/engine" "${mpi_flags[@]}"
    run_examples "$1" "$4"
}

# may_not_include FOLDER PATTERN: no file of the folder includes a path that matches the pattern.
may_not_include() {
    local found
    found=$(grep -rnE "^ *# *include *[<\"]($2)" --include='*.[ch]' --include='*.cc' --include='*.h.in' --include='*.cu' --include='*.cuh' "$1" || true)
    [ -z "$found" ] || fail "$1 may not include this:"$'\n'"$found"
}

folders_include_what_they_may() { # SOURCE
    cd "$1"
    local rest='main/|launcher/|bench/|plot/|program/|tests/|server/'
    may_not_include include "base/|kernels/|comm/|src/|$rest"
    may_not_include base "kernels/|comm/|src/|$rest"
    may_not_include kernels "comm/|src/|mpi\.h|$rest"
    may_not_include comm "kernels/|src/|$rest"
    may_not_include src "kernels/(host|cuda)/|$rest"
    # main knows launcher and bench; these share what is in program, and do not know each other.
    may_not_include program 'main/|launcher/|bench/|plot/|tests/|server/|kernels/|src/[^m]|mpi\.h|cpattn/mpi\.h'
    may_not_include launcher 'main/|bench/|plot/|tests/'
    may_not_include bench 'main/|launcher/|plot/|tests/|server/'
    may_not_include plot 'main/|launcher/|bench/|tests/|server/|kernels/|comm/|src/|mpi\.h|cpattn/mpi\.h' # files alone
    may_not_include bench/serve 'bench/[a-z_]*\.h|comm/|kernels/|src/|server/' # a client of any server
    may_not_include docs/examples "base/|kernels/|comm/|src/|$rest"
    may_not_include docs/guide "base/|kernels/|comm/|src/|$rest"
    may_not_include kernels/host 'kernels/cuda/'
    may_not_include kernels/cuda 'kernels/host/'
    # MPI and what a communicator is made of are used through cpattn/comm.h.
    may_not_include base 'mpi\.h|cpattn/mpi\.h'
    may_not_include src 'mpi\.h|cpattn/mpi\.h|comm/(mpi|store)/'
    may_not_include bench 'mpi\.h|cpattn/mpi\.h'
    may_not_include comm/mpi 'base/|comm/|src/'
    may_not_include comm/nccl 'comm/(mpi|peer)/|mpi\.h'
    may_not_include comm/peer 'comm/(mpi|nccl)/|mpi\.h'
    may_not_include comm/device 'comm/(mpi|nccl|peer)/|mpi\.h'
    # engine -> check -> model, worker -> context -> trace; engine, check, worker -> schedule -> cache.
    may_not_include src/ops 'src/(cache|schedule|trace|context|worker|model|check|engine)/'
    may_not_include src/trace 'src/(ops|cache|schedule|context|worker|model|check|engine)/'
    may_not_include src/cache 'src/(trace|context|worker|model|check|engine)/'
    may_not_include src/schedule 'src/(ops|trace|context|worker|model|check|engine)/|comm/|kernels/|mpi\.h'
    may_not_include src/context 'src/(cache|schedule|worker|model|check|engine)/'
    may_not_include src/model 'src/(cache|schedule|context|worker|check|engine)/'
    may_not_include src/worker 'src/(model|check|engine)/'
    may_not_include src/check 'src/engine/'
    # Cases are for whoever judges results: they know no run.
    may_not_include src/check/cases 'src/(ops|cache|schedule|trace|context|worker|model|engine)/|src/check/(self_test|verify)|comm/'
    # A model's folder behind an engine, which is used by its public header.
    may_not_include src/llm 'src/(ops|trace|context|worker|check|engine|reply)/|comm/|kernels/|server/|mpi\.h'
    # Text, grammars and replies are for programs and src/llm: no other room of the library knows them, nor they any.
    may_not_include src/text 'src/(ops|cache|schedule|trace|context|worker|model|check|engine|grammar|reply)/|comm/|kernels/|server/|mpi\.h'
    may_not_include src/grammar 'src/(ops|cache|schedule|trace|context|worker|model|check|engine|text|reply)/|comm/|kernels/|server/|mpi\.h'
    may_not_include src/reply 'src/(ops|cache|schedule|trace|context|worker|model|check|engine|grammar)/|comm/|kernels/|server/|mpi\.h'
    local room
    for room in src/*/; do
        [[ $room =~ ^src/(text|reply|llm)/$ ]] || may_not_include "$room" 'src/text/'
        [ "$room" = src/llm/ ] || may_not_include "$room" 'src/llm/'
        [ "$room" = src/reply/ ] || may_not_include "$room" 'src/reply/'
        [[ $room =~ ^src/(grammar|llm)/$ ]] || may_not_include "$room" 'src/grammar/'
    done
    # The server knows the engine by its public header, text, grammars and replies, and what src/llm has for both: what arrives of a request and
    # its prompt, and by what answers may be bound.
    may_not_include server 'kernels/|comm/|src/[^tgrl]|src/l[^l]|src/llm/[^abp]|src/t[^e]|src/g[^r]|src/r[^e]|mpi\.h|cpattn/mpi\.h|main/|launcher/|bench/|plot/|program/|tests/'
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
    uninstall) uninstall_package "$@" ;;
    debian) debian_agrees_with_the_project "$@" ;;
    dpkg) debian_packages_build "$@" ;;
    built) quickstart_builds_what_is_installed "$@" ;;
    manual) pages_have_what_help_has "$@" ;;
    headers) headers_compile_alone "$@" ;;
    llm) llm_exports_what_its_header_declares "$@" ;;
    symbols) exports_what_headers_declare "$@" ;;
    no_mpi) only_its_own_library_needs_mpi "$@" ;;
    loads) loads_little "$@" ;;
    cmake) examples_through_cmake "$@" ;;
    pkgconfig) examples_through_pkgconfig "$@" ;;
    includes) folders_include_what_they_may "$@" ;;
    *) fail "unknown command '$command'" ;;
esac
