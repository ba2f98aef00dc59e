"""Curves as Triton functions: the plain Python of a curve, rewritten for tensors.

A condition becomes a choice between two results; both are computed. A curve with a loop, a return inside a
branch, or a function other than ``exp``, ``expm1``, ``log``, ``log1p``, ``abs``, ``max`` and ``min`` has no such
form.
"""

import ast
import inspect
import linecache
import math
import textwrap
import zlib
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from topk_registry.ops.gpu.arithmetic import exp, expm1, log, log1p

_FUNCTIONS = {
    math.exp: "exp", math.expm1: "expm1", math.log: "log", math.log1p: "log1p", abs: "tl.abs", math.fabs: "tl.abs",
}  # fmt: skip
_CHOICES = {max: "tl.maximum", min: "tl.minimum"}


class UnsupportedCurveError(TypeError):
    """A curve that cannot be rewritten."""


@lru_cache
def compiled(curve: Callable) -> Any:
    """A curve as a Triton function of the same arguments; raises :class:`UnsupportedCurveError` where it has none."""
    assert isinstance(curve, FunctionType)
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(curve))).body
    except (OSError, SyntaxError) as error:
        raise UnsupportedCurveError(f"the source of {curve.__qualname__} cannot be read") from error
    if not isinstance(tree, ast.FunctionDef):
        raise UnsupportedCurveError(f"{curve.__qualname__} is not a function with a name")
    tree.decorator_list, tree.returns = [], None
    tree = ast.fix_missing_locations(_Rewriter(curve).visit(tree))
    source = ast.unparse(tree) + "\n"
    file = f"<curve {curve.__qualname__} {zlib.crc32(source.encode()):08x}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # Triton reads sources
    seen = {"__name__": __name__, "tl": tl, "exp": exp, "expm1": expm1, "log": log, "log1p": log1p}
    exec(compile(source, file, "exec"), seen)
    return triton.jit(seen[tree.name])


class _Rewriter(ast.NodeTransformer):
    def __init__(self, curve: FunctionType) -> None:
        self.curve, self.known, self.count = curve, set(curve.__code__.co_varnames[: curve.__code__.co_argcount]), 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = self._statements(node.body, None)
        return node

    def _statements(self, body: list[ast.stmt], condition: ast.expr | None) -> list[ast.stmt]:
        return [statement for one in body for statement in self._statement(one, condition)]

    def _statement(self, node: ast.stmt, condition: ast.expr | None) -> list[ast.stmt]:
        """Rewrite a statement that holds under a condition only."""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return []  # a docstring
        if isinstance(node, ast.AugAssign):
            value = ast.BinOp(_loaded(node.target), node.op, node.value)
            return self._statement(ast.Assign([node.target], value), condition)
        if isinstance(node, ast.Assign):
            return self._assigned(node, condition)
        if isinstance(node, ast.If):
            self.count += 1
            name = f"condition_{self.count}"
            statements: list[ast.stmt] = [_assign(name, self.visit(node.test))]
            for body, test in (
                (node.body, _name(name)),
                (node.orelse, ast.Compare(_name(name), [ast.Eq()], [_zero()])),
            ):
                both = test if condition is None else ast.BinOp(condition, ast.BitAnd(), test)
                statements += self._statements(body, both)
            return statements
        if isinstance(node, ast.Return) and condition is None and node.value is not None:
            return [ast.Return(self.visit(node.value))]
        raise self._without_form(f"`{ast.unparse(node)}`")

    def _assigned(self, node: ast.Assign, condition: ast.expr | None) -> list[ast.stmt]:
        value = self.visit(node.value)
        if condition is None:
            self.known |= {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            return [ast.Assign(node.targets, value)]
        if len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
            raise self._without_form(f"`{ast.unparse(node)}` in a branch")
        name = node.targets[0].id
        if name in self.known:
            value = _choice(condition, value, _name(name))
        self.known.add(name)
        return [_assign(name, value)]

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test, one, other = self.visit(node.test), self.visit(node.body), self.visit(node.orelse)
        if isinstance(one, ast.Tuple) and isinstance(other, ast.Tuple) and len(one.elts) == len(other.elts):
            pairs = zip(one.elts, other.elts, strict=True)
            return ast.Tuple([_choice(test, *pair) for pair in pairs], ast.Load())
        return _choice(test, one, other)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        sides = [self.visit(one) for one in (node.left, *node.comparators)]
        parts: list[ast.expr] = [ast.Compare(sides[i], [op], [sides[i + 1]]) for i, op in enumerate(node.ops)]
        return _joined(ast.BitAnd(), parts)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        both = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        return _joined(both, [self.visit(one) for one in node.values])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        operand = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return ast.Compare(operand, [ast.Eq()], [_zero()])
        return ast.UnaryOp(node.op, operand)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        function, arguments = self._value(node.func), [self.visit(one) for one in node.args]
        if not node.keywords and function in _CHOICES and len(arguments) == 2:
            keep = ast.keyword("propagate_nan", ast.parse("tl.PropagateNan.ALL", mode="eval").body)
            return ast.Call(_name(_CHOICES[function]), arguments, [keep])
        if not node.keywords and function in _FUNCTIONS and len(arguments) == 1:
            return ast.Call(_name(_FUNCTIONS[function]), arguments, [])
        raise self._without_form(f"`{ast.unparse(node)}`")

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        if not isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
            raise self._without_form(f"`{ast.unparse(node)}`")
        return ast.BinOp(self.visit(node.left), node.op, self.visit(node.right))

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.known or isinstance(node.ctx, ast.Store):
            return node
        value = self._value(node)
        if isinstance(value, (int, float)):
            return ast.Constant(float(value))
        raise self._without_form(f"`{node.id}`")

    def _value(self, node: ast.expr) -> Any:
        """Look up a name in the curve's module."""
        try:
            seen = {**vars(__import__("builtins")), **self.curve.__globals__}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                return getattr(seen[node.value.id], node.attr)
            return seen[node.id] if isinstance(node, ast.Name) else None
        except (KeyError, AttributeError):
            return None

    def _without_form(self, what: str) -> UnsupportedCurveError:
        return UnsupportedCurveError(f"{self.curve.__qualname__} has no form for GPUs: {what}")


def _choice(test: ast.expr, one: ast.expr, other: ast.expr) -> ast.expr:
    return ast.Call(_name("tl.where"), [test, one, other], [])


def _joined(op: ast.operator, parts: list[ast.expr]) -> ast.expr:
    whole = parts[0]
    for part in parts[1:]:
        whole = ast.BinOp(whole, op, part)
    return whole


def _name(name: str) -> ast.expr:
    return ast.parse(name, mode="eval").body


def _assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _loaded(target: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(target), mode="eval").body


def _zero() -> ast.expr:
    return ast.Constant(0)
