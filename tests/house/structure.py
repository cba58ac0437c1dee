"""Measures the structure of a package from its source alone; nothing of it is imported or run.

Code lines carry a token other than a comment or a docstring. The import graph counts every import
of the package's own modules: at the top of a file, inside functions, and under TYPE_CHECKING.
"""

import ast
import collections
import io
import tokenize

# Participles and pronouns that stand where a noun or a verb of the field should.
VAGUE = frozenset(
    (
        *("found", "given", "asked", "told", "own", "known", "said", "seen", "held", "kept"),
        *("noted", "heard", "made", "taken", "reached", "joined", "dealt", "collected"),
    )
)
# How docstrings begin that can't be understood without the docstring before.
DANGLING = ("The same", "Of ", "Those ", "That of", "That ", "As ", "What ", "Whether ")
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
IMPORTS = (ast.Import, ast.ImportFrom)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def tokens(text):
    """The tokens of a source text."""
    return tokenize.generate_tokens(io.StringIO(text).readline)


def code_lines(text, tree):
    """How many lines carry code."""
    prose = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None)
            is_text = isinstance(statement, ast.Expr) and isinstance(value, ast.Constant)
            if is_text and isinstance(value.value, str):
                prose.update(range(statement.lineno, statement.end_lineno + 1))
    code = set()
    for token in tokens(text):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


class Imports(ast.NodeVisitor):
    """Collects (target, kind) of a module's imports of its own package; kind: top, lazy or type."""

    def __init__(self, name, is_package, modules):
        self.package = name if is_package else name.rpartition(".")[0]
        self.modules, self.kind, self.edges = modules, "top", []

    def visit_If(self, node):
        """Branches for type checkers are of their own kind."""
        if "TYPE_CHECKING" not in ast.dump(node.test):
            self.generic_visit(node)
            return
        before, self.kind = self.kind, "type"
        for statement in node.body:
            self.visit(statement)
        self.kind = before
        for statement in node.orelse:
            self.visit(statement)

    def visit_FunctionDef(self, node):
        """What a function imports comes when it is called."""
        before = self.kind
        self.kind = "lazy" if before == "top" else before
        self.generic_visit(node)
        self.kind = before

    def visit_Lambda(self, node):
        """A lambda likewise."""
        self.visit_FunctionDef(node)

    def visit_AsyncFunctionDef(self, node):
        """A coroutine likewise."""
        self.visit_FunctionDef(node)

    def visit_Import(self, node):
        """``import a.b``."""
        self.edges += [(a.name, self.kind) for a in node.names if a.name in self.modules]

    def visit_ImportFrom(self, node):
        """``from a import b``: of a module b, or of a."""
        base = node.module or ""
        if node.level:
            above = self.package.split(".")
            base = ".".join([*above[: len(above) - node.level + 1], *([base] if base else [])])
        if base in self.modules:
            names = [f"{base}.{alias.name}" for alias in node.names]
            self.edges += [(n if n in self.modules else base, self.kind) for n in names]


def circles(graph):
    """Groups of modules that import each other, largest first (Tarjan, without recursion)."""
    index, low, stack, groups = {}, {}, [], []
    for root in graph:
        work = [] if root in index else [(root, None)]
        while work:
            node, targets = work.pop()
            if targets is None:
                index[node] = low[node] = len(index)
                stack.append(node)
                targets = iter(graph[node])
            for target in targets:
                if target not in index:
                    work += [(node, targets), (target, None)]
                    break
                if target in stack:
                    low[node] = min(low[node], low[target])
            else:
                if low[node] == index[node]:
                    group = stack[stack.index(node) :]
                    del stack[stack.index(node) :]
                    if len(group) > 1:
                        groups.append(sorted(group))
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
    return sorted(groups, key=len, reverse=True)


def measure(root):
    """(figures by name, circles of imports) of the package in this folder."""
    texts = {}
    for path in sorted(root.rglob("*.py")):
        name = ".".join((root.name, *path.relative_to(root).with_suffix("").parts))
        is_package = name.endswith(".__init__")
        texts[name[: -len(".__init__")] if is_package else name] = (path, path.read_text("utf-8"))
    trees = {name: ast.parse(text) for name, (_, text) in texts.items()}
    graph, kinds = {}, collections.Counter()
    for name, tree in trees.items():
        imports = Imports(name, texts[name][0].name == "__init__.py", texts)
        imports.visit(tree)
        edges = [edge for edge in imports.edges if edge[0] != name]
        kinds.update(kind for _, kind in edges)
        graph[name] = sorted({target for target, _ in edges})
    counts, classes = collections.Counter(), collections.Counter()
    for name, tree in trees.items():
        text = texts[name][1]
        counts["vague_names"] += sum(
            t.type == tokenize.NAME and t.string in VAGUE for t in tokens(text)
        )
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
                counts["docstrings_that_dangle"] += (ast.get_docstring(node) or "").startswith(
                    DANGLING
                )
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name] += 1
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                counts["getattr_none_probes"] += (
                    len(node.args) == 3
                    and isinstance(node.args[2], ast.Constant)
                    and node.args[2].value is None
                )
            if isinstance(node, IMPORTS):
                counts["import_lines"] += node.end_lineno - node.lineno + 1
            counts["any_uses"] += isinstance(node, ast.Name) and node.id == "Any"
    lines = {name: code_lines(text, trees[name]) for name, (_, text) in texts.items()}
    stubs = [path.read_text("utf-8") for path in root.rglob("*.pyi")]
    groups = circles(graph)
    figures = {
        "files": len(texts),
        # Stubs are tables of names that packages read.
        "code": sum(lines.values()) + sum(code_lines(text, ast.parse(text)) for text in stubs),
        "longest_file": max(lines.values()),
        "root_files": len(list(root.glob("*.py"))),
        "circles": len(groups),
        "largest_circle": max(map(len, groups), default=0),
        "lazy_imports": kinds["lazy"],
        "type_only_imports": kinds["type"],
        **counts,
        "class_names_used_twice": sum(count > 1 for count in classes.values()),
    }
    return figures, groups
