"""What run_page.py finds in pages that are not right: test_run_page.py"""
import os
import subprocess
import sys
import tempfile

import run_page

RUNNER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run_page.py")


def page_of(*blocks):
    return "# A page\n\n" + "\n\n".join(f"```{words}\n{code}\n```" for words, code in blocks) + "\n"


def run(text):
    """Exit code, and what the runner says of a page."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("guide/examples", "build/main"):
            os.makedirs(os.path.join(folder, name))
        with open(os.path.join(folder, "guide/examples/twice.py"), "w", encoding="utf-8") as file:
            file.write("def twice(x):\n    y = x\n    return x + y\n")
        page = os.path.join(folder, "guide/page.md")
        with open(page, "w", encoding="utf-8") as file:
            file.write(text)
        done = subprocess.run([sys.executable, RUNNER, page, folder, os.path.join(folder, "build")],
                              capture_output=True, text=True, check=False)
        return done.returncode, done.stdout


def test_lines():
    same = run_page.first_difference
    assert same("a 1.5 s\nb 2", "a 17.25  s\n\nb 2\n") is None
    assert same("a 1.5e-07 of 3", "a 2.25e-11 of 3") is None
    assert same("a ...\n...\nd", "a b\nc\nc\nd") is None
    assert same("a\n...", "a\nb\nc") is None
    assert same("a 1.5 s", "a nan s")
    assert same("b 2", "b 3")
    assert same("a", "a\nb")
    assert same("a\nb", "a")
    assert same("a\n...\nd", "a\nc")


def test_pages():
    code, said = run(page_of(("sh", "x=3; echo $x"), ("output", "3"), ("sh", "echo $((x + 1))"), ("output", "4"),
                             ("python", "y = x\nreturn x + y"), ("sh elsewhere", "false")))
    assert code == 0 and "2 blocks" in said, said
    for blocks, reason in (
            ([("sh", "echo 4"), ("output", "3")], "expected '3', found '4'"),
            ([("sh", "false\necho 3"), ("output", "3")], "exit code 1 of block 1 of 1"),
            ([("sh", "echo 3 | false")], "exit code 1"),
            ([("python", "y = x\nreturn y + x")], "stands in no file"),
            ([("sh elsewhere", "if")], "syntax error"),
            ([("shell", "true")], "a block of an unknown kind: shell")):
        code, said = run(page_of(*blocks))
        assert code == 1 and reason in said, (blocks, said)
    assert run("# A page: here, now\n\nSee [here](page.md#a-page-here-now).\n")[0] == 0
    for target in ("nowhere.md", "page.md#elsewhere"):
        code, said = run(f"See [there]({target}).\n")
        assert code == 1 and f"leads nowhere: {target}" in said, said


if __name__ == "__main__":
    test_lines()
    test_pages()
    print("the runner of pages sees what is wrong with them")
