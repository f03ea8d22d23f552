"""Runs a page of docs/guide as its reader would, and compares what its commands print with what stands there:
    run_page.py PAGE SOURCE BUILD [NEEDED...]
The blocks of a page, by the words behind their backquotes:
    sh            is run, all of them in one shell, in a folder that looks like the project's after ./quickstart build
    sh elsewhere  is not run, as it takes a cluster, a network or minutes; it is parsed
    output        is what the block before prints. A number with a point stands for any such number, "..." for any text
                  within a line and, alone on its line, for any lines; spaces for spaces
    c, python     stands like that, but for where it begins in a line, in a file of docs/guide/examples
Relative links lead to files, and to headings in them. NEEDED are programs, modules of Python as "python:NAME", and
"root"; without one of them the test is skipped. Of the environment, PYTHON is the Python whose programs come first, and
PREFIX where the library is installed, "prefix" for the page. Who needs pycparser has the package cpattn of the build.
"""
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

TIME_LIMIT_S = 240
END_LIMIT_S = 5  # for what a page traps, before it is killed


def blocks_of(text):
    """(line, words, code) of each fenced block."""
    found = []
    for match in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE):
        found.append((text[:match.start()].count("\n") + 1, match.group(1).split(), match.group(2)))
    return found


def python_of_pages():
    return shutil.which(os.environ.get("PYTHON", "python3"))


def without(needed):
    for name in needed:
        if name.startswith("python:"):
            if subprocess.run(["python3", "-c", f"import {name[7:]}"], capture_output=True, check=False).returncode:
                return f"Python's {name[7:]}"
        elif name == "root":
            if os.geteuid() != 0:
                return "right to do what root may"
        elif not shutil.which(name):
            return name
    return None


def free_ports(n):
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [str(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


def pattern_of_line(line):
    """What a line of an output block stands for."""
    pattern = re.escape(" ".join(line.split()))
    pattern = pattern.replace(r"\.\.\.", ".*").replace(r"\ ", " ")
    return re.sub(r"\d+\\\.\d+(e[+\\-]*\d+)?", lambda _: r"\d+(\.\d+)?(e[+-]?\d+)?", pattern)


def first_difference(wanted, printed):
    """None, or the first line of `wanted` that is not printed, and the line in its place."""
    lines = [" ".join(line.split()) for line in printed.splitlines() if line.strip()]
    at, skips = 0, False
    for line in wanted.splitlines():
        if not line.strip():
            continue
        if line.strip() == "...":
            skips = True
            continue
        pattern = re.compile(pattern_of_line(line))
        here = at
        while skips and here < len(lines) and not pattern.fullmatch(lines[here]):
            here += 1
        if here >= len(lines) or not pattern.fullmatch(lines[here]):
            found = lines[at] if at < len(lines) else "nothing more"
            return line, "it nowhere behind" if skips else found
        at, skips = here + 1, False
    if at < len(lines) and not skips:
        return "nothing more", lines[at]
    return None


def make_project(folder, source, build):
    """The files of the project and what a build leaves, so that nothing of the page is written there."""
    for name in ("configs", "deploy", "docs", "tests"):  # not what a reader's own run of a page has left
        os.symlink(os.path.join(source, name), os.path.join(folder, name))
    os.mkdir(os.path.join(folder, "build"))
    os.symlink(build, os.path.join(folder, "build", "release"))
    os.symlink(os.path.join(build, "main", "cp_attn"), os.path.join(folder, "cp_attn"))
    if "PREFIX" in os.environ:
        os.symlink(os.environ["PREFIX"], os.path.join(folder, "prefix"))


def environment_of(folder):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CPATTN_")}
    environment.update(
        CPATTN_DEVICE="host", CUDA_VISIBLE_DEVICES="", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_hwloc_base_binding_policy="none", OMP_NUM_THREADS="1",
        PYTHONDONTWRITEBYTECODE="1", TMPDIR=folder)
    environment["PATH"] = os.path.dirname(python_of_pages()) + ":" + environment["PATH"]
    return environment


def lay_out_package(folder, source, build, environment):
    """The Python package of the build, for the commands of the page."""
    packages = os.path.join(folder, "build", "packages")
    os.mkdir(packages)
    subprocess.run(["bash", os.path.join(source, "python", "tests", "lay_out.sh"), build, "python3", packages],
                   env=environment, check=True)
    environment["PYTHONPATH"] = packages


def end_group(shell):
    """Ends what the shell has started: by SIGTERM, so that traps run, and what is left by SIGKILL."""
    try:
        os.killpg(shell.pid, signal.SIGTERM)
        until = time.monotonic() + END_LIMIT_S
        while time.monotonic() < until:
            shell.poll()  # a process that nobody waits for is still one of the group
            os.killpg(shell.pid, 0)
            time.sleep(0.05)
        os.killpg(shell.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run(blocks, folder, environment):
    """Runs the blocks, and returns what each has printed, and the exit code of the last."""
    outputs = [os.path.join(folder, f"printed.{i}") for i in range(len(blocks))]
    script = "set -eu -o pipefail\n"
    for code, output in zip(blocks, outputs):
        script += f"exec >{output} 2>&1\n{code}"
    # No job control: what is in the background stays in this group, and ends with it.
    with subprocess.Popen(["bash", "-c", script], cwd=folder, env=environment, start_new_session=True,
                          stdin=subprocess.DEVNULL) as shell:
        try:
            code = shell.wait(TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            code = f"none in {TIME_LIMIT_S} s"
        end_group(shell)
    texts = []
    for output in outputs:
        if os.path.exists(output):
            with open(output, encoding="utf-8", errors="replace") as file:
                texts.append(file.read())
    return texts, code


def check_excerpt(code, examples):
    """None, or what is wrong with a block that should stand in an example."""
    wanted = textwrap.dedent(code).strip().splitlines()
    for name in sorted(os.listdir(examples)):
        with open(os.path.join(examples, name), encoding="utf-8") as file:
            lines = file.read().splitlines()
        for at in range(len(lines)):
            part = lines[at:at + len(wanted)]
            if textwrap.dedent("\n".join(part)).splitlines() == wanted:
                return None
    return f"stands in no file of {os.path.basename(os.path.dirname(examples))}/examples: {wanted[0]}"


def leads_somewhere(path, anchor):
    """Whether there is such a file, with a heading of that anchor as GitHub makes it."""
    if not anchor or not os.path.exists(path):
        return os.path.exists(path)
    with open(path, encoding="utf-8") as file:
        headings = re.findall(r"^#+ (.*)$", file.read(), re.MULTILINE)
    return anchor in (re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings)


def check_text(page, text, blocks):
    """What is wrong with links, excerpts, and commands that are not run."""
    folder, wrong = os.path.dirname(page), []
    for target, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", text):
        if "://" not in target and not leads_somewhere(os.path.join(folder, target), anchor):
            wrong.append(f"a link leads nowhere: {target}{anchor and '#'}{anchor}")
    for line, words, code in blocks:
        problem = None
        if words[:1] in (["c"], ["python"]):
            problem = check_excerpt(code, os.path.join(folder, "examples"))
        elif words == ["sh", "elsewhere"]:
            problem = subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True, check=False).stderr
        elif words not in (["sh"], ["output"], ["text"], ["yaml"]):
            problem = f"a block of an unknown kind: {' '.join(words)}"
        if problem:
            wrong.append(f"line {line}: {problem}")
    return wrong


def check_outputs(blocks, texts, ports):
    """What the commands of a page print otherwise. What they have printed stands in `texts`."""
    wrong, at = [], -1
    for line, words, code in blocks:
        if words == ["sh"]:
            at += 1
        elif words == ["output"] and at < len(texts):
            printed = texts[at]
            for shown, port in ports.items():
                printed = printed.replace(port, shown)
            difference = first_difference(code, printed)
            if difference:
                wrong.append(f"line {line}: expected '{difference[0]}', found '{difference[1]}', of\n{printed}")
    return wrong


def main(page, source, build, *needed):
    if not python_of_pages():
        print(f"skipped: no {os.environ['PYTHON']}")
        return 77
    with open(page, encoding="utf-8") as file:
        text = file.read()
    blocks = blocks_of(text)
    folder = os.path.realpath(tempfile.mkdtemp(prefix="guide-"))
    try:
        environment = environment_of(folder)
        os.environ["PATH"] = environment["PATH"]
        lack = without(needed)
        if lack:
            print(f"skipped: no {lack}")
            return 77
        make_project(folder, source, build)
        if "python:pycparser" in needed:
            lay_out_package(folder, source, build, environment)
        ports = dict(zip(("8000", "29500"), free_ports(2)))
        commands = [re.sub(r"\b(8000|29500)\b", lambda match: ports[match.group()], code)
                    for _, words, code in blocks if words == ["sh"]]
        environment["PET_MASTER_PORT"] = ports["29500"] # of torchrun
        texts, code = run(commands, folder, environment)
        wrong = check_text(page, text, blocks) + check_outputs(blocks, texts, ports)
        if code != 0 or len(texts) < len(commands):
            wrong.insert(0, f"exit code {code} of block {len(texts)} of {len(commands)}, which printed\n"
                         + (texts[-1] if texts else ""))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for problem in wrong:
        print(f"{os.path.basename(page)}: {problem}")
    if not wrong:
        print(f"{os.path.basename(page)}: {len(commands)} blocks of commands did what the page says")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*[os.path.abspath(argument) for argument in sys.argv[1:4]], *sys.argv[4:]))
