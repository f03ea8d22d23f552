"""Writes the ctypes declarations of libcpattn from its public headers, so that no struct is written twice.

    declarations.py COMPILER INCLUDE_FOLDER OUTPUT

Needs pycparser and a C preprocessor. Every struct becomes a ctypes.Structure, every constant of an enum an int, and
every function an entry of FUNCTIONS, or of LLM_FUNCTIONS where libcpattn_llm has it: (name, type of the result, types of
the arguments). Pointers are addresses (c_void_p), which byref() and ctypes arrays fit.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from pycparser import c_ast, c_parser

# What the headers take from the C library; the real headers of a compiler are more than C99.
STAND_INS = {
    "stddef.h": "typedef unsigned long size_t;\n#define NULL ((void *)0)\n",
    "stdint.h": "".join(f"typedef {kind} {name}_t;\n" for name, kind in {
        "int8": "signed char", "uint8": "unsigned char", "int32": "int", "uint32": "unsigned",
        "int64": "long", "uint64": "unsigned long"}.items()),
}
SCALARS = {
    "char": "c_char", "signed char": "c_int8", "unsigned char": "c_uint8", "int": "c_int32", "unsigned": "c_uint32",
    "unsigned int": "c_uint32", "long": "c_int64", "unsigned long": "c_uint64", "float": "c_float",
    "double": "c_double", "void": "None",
}


def preprocess(compiler, include):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in STAND_INS.items():
            Path(folder, name).write_text(text)
        done = subprocess.run(
            [compiler, "-E", "-P", "-nostdinc", "-x", "c", "-std=c11", f"-I{folder}", f"-I{include}",
             "-D__attribute__(x)=", "-"],
            input="#include <cpattn/cpattn.h>\n#include <cpattn/llm.h>\n", capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"declarations.py: {compiler} -E of the headers failed:\n{done.stderr}")
    return done.stdout


class Declarations:
    def __init__(self, tree):
        self.typedefs = {}  # name -> the name of what it stands for in the output
        self.constants = {}
        self.lines = []
        self.functions = []
        self.structs = set()
        for node in tree.ext:
            self.take(node)

    def take(self, node):
        if isinstance(node, c_ast.FuncDef):
            node = node.decl
        if isinstance(node, c_ast.Typedef):
            self.typedefs[node.name] = self.type_of(node.type, node.name)
        elif isinstance(node.type, c_ast.FuncDecl):
            arguments = [self.type_of(p.type) for p in (node.type.args.params if node.type.args else [])]
            self.functions.append((node.name, self.type_of(node.type.type),
                                   [] if arguments == ["None"] else arguments))
        else:
            self.type_of(node.type)

    def type_of(self, node, name=None):
        """The ctypes expression of a type; `name`: of the typedef that names it."""
        if isinstance(node, c_ast.TypeDecl):
            return self.type_of(node.type, name)
        if isinstance(node, c_ast.PtrDecl):
            target = node.type.type if isinstance(node.type, c_ast.TypeDecl) else None
            text = isinstance(target, c_ast.IdentifierType) and target.names == ["char"] and "const" in node.type.quals
            return "c_char_p" if text else "c_void_p"
        if isinstance(node, c_ast.ArrayDecl):
            return f"{self.type_of(node.type)} * {self.value(node.dim)}"
        if isinstance(node, c_ast.IdentifierType):
            names = " ".join(node.names)
            return SCALARS[names] if names in SCALARS else self.typedefs[names]
        if isinstance(node, c_ast.Enum):
            self.take_enum(node)
            return "c_int32"
        if isinstance(node, c_ast.Struct):
            return self.take_struct(node, node.name or name)
        if isinstance(node, c_ast.FuncDecl):
            return "c_void_p"
        raise SystemExit(f"declarations.py: no declaration of {type(node).__name__} at {node.coord}")

    def take_enum(self, node):
        next_value = 0
        for constant in node.values.enumerators if node.values else []:
            if constant.value is not None:
                next_value = self.value(constant.value)
            self.constants[constant.name] = next_value
            next_value += 1

    def take_struct(self, node, name):
        if node.decls is None:
            return name  # of an object that only the library knows, or of a struct above
        if name not in self.structs:
            self.structs.add(name)
            fields = []
            for field in node.decls:
                kind = self.type_of(field.type)
                if isinstance(field.type, c_ast.ArrayDecl) and kind.startswith("c_char *"):
                    kind = f"c_char{kind[6:]}"
                fields.append(f'        ("{field.name}", {kind}),\n')
            self.lines.append(f"class {name}(Structure):\n    _fields_ = [\n{''.join(fields)}    ]\n\n")
        return name

    def value(self, node):
        """The value of a constant expression."""
        if isinstance(node, c_ast.Constant):
            return int(node.value.rstrip("uUlL"), 0)
        if isinstance(node, c_ast.ID):
            return self.constants[node.name]
        if isinstance(node, c_ast.UnaryOp) and node.op == "-":
            return -self.value(node.expr)
        if isinstance(node, c_ast.BinaryOp) and node.op in ("+", "-", "*", "<<"):
            left, right = self.value(node.left), self.value(node.right)
            return {"+": left + right, "-": left - right, "*": left * right, "<<": left << right}[node.op]
        raise SystemExit(f"declarations.py: no constant at {node.coord}")

    def argument(self, kind):
        return kind.split(" * ")[0] if kind in self.structs else "c_void_p" if " * " in kind else kind

    def text(self):
        out = ['"""Declarations of libcpattn, made from its headers by declarations.py."""\n\n'
               "from ctypes import (Structure, c_char, c_char_p, c_double, c_float, c_int8, c_int32, c_int64,\n"
               "                    c_uint8, c_uint32, c_uint64, c_void_p)\n\n"]
        out += self.lines
        out += [f"{name} = {value}\n" for name, value in self.constants.items()]
        of_llm = [f for f in self.functions if f[0].startswith("cpa_llm_")]
        for variable, functions in (("FUNCTIONS", [f for f in self.functions if f not in of_llm]),
                                    ("LLM_FUNCTIONS", of_llm)):
            out.append(f"\n{variable} = [\n")
            for name, result, arguments in functions:
                joined = "".join(self.argument(a) + ", " for a in arguments)
                out.append(f'    ("{name}", {result}, ({joined})),\n')
            out.append("]\n")
        return "".join(out)


def main(compiler, include, output):
    tree = c_parser.CParser().parse(preprocess(compiler, include))
    Path(output).write_text(Declarations(tree).text())


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
