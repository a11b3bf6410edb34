"""Puts the meter into a parsed template: calls to it before whatever the sandbox cannot see.

jinja2 lets a sandbox step in at operators, calls, attributes, filters and output. Loops, slices,
literals, comparisons, ``~`` and captured blocks run as plain Python. This rewrites those in the
syntax tree, so that each goes through a method of `sandbox.BoundedEnvironment`.
"""

# ruff: noqa: N802 (jinja2's visitors have methods with the names of classes)

from __future__ import annotations

from typing import Any, TypeVar

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.visitor import NodeTransformer

#: The filter that checks what ``{% set x %}…{% endset %}`` captures.
ADMIT_FILTER = "trioserve_admit"

_REFUSED: dict[type[nodes.Node], str] = {
    nodes.Extends: "extends",
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "from … import",
    nodes.ScopedEvalContextModifier: "autoescape",
    nodes.EvalContextModifier: "autoescape",
}

_Node = TypeVar("_Node", bound=nodes.Node)


def meter_in(tree: nodes.Template, environment: Environment) -> nodes.Template:
    """Rewrite a parsed template.

    Raises:
        TemplateSyntaxError: it uses a statement that chat templates have no use for.
    """
    metered: nodes.Template = _Metering().visit(tree)
    metered.set_environment(environment)
    return metered


class _Metering(NodeTransformer):
    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if type(node) in _REFUSED:
            raise TemplateSyntaxError(
                f"'{_REFUSED[type(node)]}' is not supported in chat templates", node.lineno
            )
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        """Pay for each pass, and tell the meter which message is being rendered."""
        over_messages = _mentions_messages(node.iter)
        self.generic_visit(node)
        item: list[nodes.Expr] = []
        if over_messages and isinstance(node.target, nodes.Name):
            item = [nodes.Name(node.target.name, "load")]
        node.body.insert(0, _at(node, nodes.ExprStmt(_call("tick", *item))))
        if node.test is not None:
            node.test = _at(node, nodes.And(_call("tick"), node.test))
        if not item:
            return [node]
        return [node, _at(node, nodes.ExprStmt(_call("tick", nodes.Const(None))))]

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        """Pay for the template's own text. Expressions are paid for by `finalize`."""
        size = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        self.generic_visit(node)
        if not size:
            return [node]
        return [_at(node, nodes.ExprStmt(_call("text", nodes.Const(size)))), node]

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        # A filter without a node of its own is applied to the captured text.
        captured: Any = node.filter
        node.filter = _at(node, nodes.Filter(captured, ADMIT_FILTER, [], [], None, None))
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _at(node, _call("sliced", node)) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._admitted(node) if node.items else _at(node, _call("growable"))

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._admitted(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._admitted(node) if node.ctx == "load" else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _at(node, _call("tilde", *node.nodes))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Pay for reading both sides, unless one is a constant that bounds the work."""
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        same = all(operand.op in ("eq", "ne") for operand in node.ops)
        if len(sides) == 2 and same and any(isinstance(side, nodes.Const) for side in sides):
            return node
        node.expr = _at(node, _call("read", node.expr))
        for operand in node.ops:
            operand.expr = _at(node, _call("read", operand.expr))
        return node

    def _admitted(self, node: nodes.Expr) -> nodes.Node:
        return _at(node, _call("admit", node))


def _call(name: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


def _at(place: nodes.Node, node: _Node) -> _Node:
    node.set_lineno(place.lineno)
    return node


def _mentions_messages(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Name) and "messages" in node.name:
        return True
    names = [name.name for name in node.find_all(nodes.Name)]
    names += [attribute.attr for attribute in node.find_all(nodes.Getattr)]
    if isinstance(node, nodes.Getattr):
        names.append(node.attr)
    return any("messages" in name for name in names)
