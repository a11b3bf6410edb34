"""The sandbox of chat templates: what it computes, and what it does not let a template do."""

from __future__ import annotations

import datetime
import resource
import sys
import time

import jinja2
import jinja2.sandbox
import pytest

from trioserve.chat.template.builtin import CHATML
from trioserve.chat.template.render import ChatTemplate
from trioserve.chat.template.sandbox import Limits
from trioserve.errors import TemplateError

USER = {"role": "user", "content": "Hi"}


def render(source: str, **variables: object) -> str:
    template = ChatTemplate(source, now=lambda: datetime.datetime(2025, 3, 4))
    # Not `render`: that finds the capabilities first, which renders many times.
    messages = [dict(USER)]
    # A part of the usual time, to be quick.
    return template._run(messages, variables, [0], Limits(seconds=0.1))


# -- it does what jinja2 does

SAME = [
    "{{ [1, 2, 3][1:] }}{{ 'abc'[::-1] }}{{ (1, 'a') }}{{ {'a': [1]} }}",
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role }}{% endfor %}",
    "{% for a, b in [(1, 2), (3, 4)] if a > 1 %}{{ a }}{{ b }}{% else %}none{% endfor %}",
    "{% for x in missing %}{{ x }}{% else %}none{% endfor %}",
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
    "{% if i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}{{ loop(x) }}"
    "{% else %}{{ x }}{% endif %}{% endfor %}",
    "{% set x %}a{{ 1 }}b{% endset %}{{ x|upper }}{% set y | trim %} c {% endset %}{{ y }}",
    "{% macro m(a, b='z') %}{{ a ~ b }}{{ varargs }}{{ caller() if caller }}{% endmacro %}"
    "{{ m(1) }}{{ m(1, 2, 3) }}{% call m('q') %}body{% endcall %}",
    "{% filter upper %}abc{% endfilter %}{% raw %}{{ }}{% endraw %}",
    "{% set ns = namespace(n=0) %}{% for i in range(4) %}{% set ns.n = ns.n + i %}{% endfor %}"
    "{{ ns.n }}",
    "{{ 1 + 2 * 3 - 4 / 5 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ -3 }}{{ 'ab' * 3 }}",
    "{{ 'a' ~ 1 ~ none ~ [2] }}{{ '%s-%05.1f' % ('a', 2.5) }}{{ '%(k)s' % {'k': 'v'} }}",
    "{{ '{:>5}|{x!r}|{0[1]}'.format([7, 8]|string, x='y') }}",
    "{{ 1 < 2 <= 2 }}{{ 'a' in 'cat' }}{{ 3 not in [1, 2] }}{{ 1 == 1.0 }}{{ 'a' != 'b' }}",
    "{{ ' a b '.strip().split(' ')|join('-') }}{{ 'a,b'.replace(',', ';') }}{{ 'a'.center(5) }}",
    "{{ {'b': 1, 'a': 2}|dictsort }}{{ {'a': 1}.items()|list }}{{ {'a': 1}|items|list }}",
    "{{ [3, 1, 2]|sort|join }}{{ [1, 2]|sum }}{{ ['a', 'b']|map('upper')|list }}",
    "{{ messages|map(attribute='role')|list }}{{ messages|selectattr('role', 'equalto', 'user')"
    "|list|length }}",
    "{{ 'a\nb'|indent(2, first=true) }}{{ missing|default('d') }}{{ 'x'|string }}{{ '3'|int + 1 }}",
    "{{ 1 if missing is not defined else 2 }}{{ none is none }}{{ 'A' is upper }}{{ 2 is even }}",
    "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{% if not false and (true or x) %}y{% endif %}",
    "{{ dict(a=1) }}{{ 'é'|urlencode }}{{ '<b>'|e }}{{ 2.345|round(1) }}{{ 'abc'|first }}",
    "{{ 2.345|round(precision=1, method='floor') }}{{ 'aba'|replace(old='a', new='b', count=1) }}"
    "{{ 'a\nb'|indent(width=2, first=true, blank=true) }}{{ [1, 2]|join(d='-') }}"
    "{{ 'a'|center(width=5) }}{{ [1]|sum(start=1) }}{{ '\t'.expandtabs(tabsize=2) }}",
    "{% for x in ['a'] %}{{ x.replace('a', 'b') }}{{ x.center(3) }}{{ '-'.join([x, x]) }}"
    "{% endfor %}"
    "{% block b %}{% set x = 'a' %}{{ x.replace('a', 'b') }}{{ '-'.join([x, x]) }}{% endblock %}",
    "  {%- if true %}\n  yes  \n{% endif %}\ntail\n",
    "{% block title %}in a block{% endblock %}{{ self.title() }}",
]


@pytest.mark.parametrize("source", SAME)
def test_it_renders_as_jinja2_does(source: str) -> None:
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    assert render(source) == plain.from_string(source).render(messages=[USER])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'b': '<é>', 'a': [1, none]}|tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ {'a': 1}|tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ {'b': 1, 'a': 2}|tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
        ("{{ 'é'|tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ ('{\"a\": [1]}'|from_json).a[0] }}", "1"),
        ("{{ '<b>'|safe + '&' }}", "<b>&"),
        ("{{ messages|map(attribute='role') }}", "['user']"),
        ("{{ strftime_now('%d %b %Y') }}", "04 Mar 2025"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}", "a1"),
        ("{% set q = [] %}{% set _ = q.append('a') %}{{ q }}{{ q.pop(0) }}{{ q }}", "['a']a[]"),
    ],
)
def test_what_it_has_in_addition(source: str, expected: str) -> None:
    assert render(source) == expected


# -- what it does not let a template do

NESTED_LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": NESTED_LOOPS,
    "loop filter": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}"
    "{% endfor %}",
    "text": "{{ 'a' * 10**9 }}",
    "text, reversed": "{{ 1000000000 * 'a' }}",
    "list": "{{ [0] * 1000000000 }}",
    "power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "percent precision": "{{ '%.999999999f' % 1.0 }}",
    "percent names": "{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}",
    "percent by name": "{{ '%(a)999999999d' % {'a': 1} }}",
    "percent by odd name": "{{ '%((a))999999999d' % {'(a)': 1} }}",
    "percent by name, later": "{{ '%(%(a)s)999999999d' % {'%(a)s': 1} }}",
    "percent filter": "{{ '%999999999d'|format(1) }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "format nested": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "format repeated": "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "format map": "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "format by item": "{{ '{:>999999999}'['format'](1) }}",
    "format by name": "{% set f = '{:>999999999}'.format %}{{ f(1) }}",
    "macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro tree": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "doubled +": "{% set n = namespace(s='aa') %}{% for i in range(60) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "doubled ~": "{% set n = namespace(s='aa') %}{% for i in range(60) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubled block": "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set x %}"
    "{{ n.s }}{{ n.s }}{% endset %}{% set n.s = x %}{% endfor %}",
    "shared lists": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}"
    "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "shared tuples": "{% set n = namespace(s=1) %}{% for i in range(60) %}"
    "{% set n.s = (n.s, n.s) %}{% endfor %}{{ n.s == 1 }}",
    "shared dicts": "{% set n = namespace(s=1) %}{% for i in range(60) %}"
    "{% set n.s = {'a': n.s, 'b': n.s} %}{% endfor %}{{ n.s|tojson }}",
    "deep lists": "{% set n = namespace(s=1) %}{% for i in range(9999) %}"
    "{% set n.s = [n.s] %}{% endfor %}",
    "center": "{{ 'a'.center(999999999) }}",
    "center filter": "{{ 'a'|center(999999999) }}",
    "method by name": "{% set f = 'a'.ljust %}{{ f(999999999) }}",
    "tabs": "{{ '\t'.expandtabs(999999999) }}",
    "tabs by name": "{{ '\t'.expandtabs(tabsize=999999999) }}",
    "text times text": "{{ ('a' * 999999) * ('a' * 999999) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "replace filter": "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "replace nothing": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "join": "{{ ('x' * 100000).join(['a'] * 10000) }}",
    "join filter": "{{ range(10000)|join('x' * 100000) }}",
    "indent": "{{ ('\n' * 10000)|indent(1000000) }}",
    "json indent": "{{ [1]|tojson(indent=100000) }}",
    "json indents": "{{ ([[[[[[[[[1]]]]]]]]] * 9000)|tojson(indent=16) }}",
    "json separators": "{{ [1]|tojson(separators=('a' * 100000, ':')) }}",
    "round": "{{ 1.5|round(999999999, 'ceil') }}",
    "bytes": "{{ (1).to_bytes(999999999, 'big') }}",
    "append": "{% set a = [] %}{% for i in range(99999) %}{% set _ = a.append('x' * 9999) %}"
    "{% endfor %}",
    "append itself": "{% set a = [] %}{% set _ = a.append(a) %}{{ a }}",
    "dates": "{{ strftime_now('%999999999Y') }}",
    "sum of lists": "{{ [[1], [2]]|sum(start=[]) }}",
    "own text": "{% for i in range(99999) %}" + "y" * 10_000 + "{% endfor %}",
    "own text, captured": "{% set x %}{% for i in range(99999) %}"
    + "y" * 10_000
    + "{% endfor %}{% endset %}",
    "own text, captured bit by bit": "{% set x %}{% for i in range(99999) %}"
    + "{% if i %}y{% endif %}" * 1000
    + "{% endfor %}{% endset %}",
    "format of a namespace": "{% set n = namespace(s='x' * 999999) %}{{ '"
    + "{0.s}" * 9999
    + "'.format(n) }}",
    "join in a loop": "{% for x in [1] %}{{ ('x' * 100000).join(['a'] * 10000) }}{% endfor %}",
    "splits": "".join(f"{{% set v{i} = ('ab ' * 80000).split() %}}" for i in range(500)),
    "loop tree": "{% for x in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}"
    "{% endif %}{% endfor %}",
    "comparison": "{% set a = 'x' * 999999 %}{% set b = 'x' * 999998 + 'x' %}"
    "{% for i in range(99999) %}{% if a == b or a in b %}{% endif %}{% endfor %}",
    "slices": "{% set a = 'x' * 999999 %}{% for i in range(99999) %}{% set b = a[1:] %}"
    "{% endfor %}",
    "tests": "{% set a = 'x' * 999999 %}{% for i in range(99999) %}{% if a is lower %}{% endif %}"
    "{% endfor %}",
    "filters": "{% set a = '(a ' * 99999 %}{% for i in range(9999) %}{% if a|title %}{% endif %}"
    "{% endfor %}",
    "changed": "{% set a = 'x' * 999999 %}{% for i in range(9999) %}"
    "{% if loop.changed(a ~ i) %}{% endif %}{% endfor %}",
    "variables": "".join(f"{{% set v{i} = 'x' * 999999 %}}" for i in range(500)),
    "sorts": "{% for i in range(999) %}{% set x = range(50000)|sort|length %}{% endfor %}",
    "colliding numbers": "{{ range(0, 10**18 * 999, 2305843009213693951)|unique|list }}",
    "block in itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "loop in itself": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "deep JSON": "{{ ('[' * 100000)|from_json }}",
    "class": "{{ ''.__class__.__mro__ }}",
    "class by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "class by filter": "{{ (''|attr('__class__')).x }}",
    "globals": "{{ raise_exception.__globals__.x }}",
    "clear": "{{ messages.clear() }}",
    "update": "{{ messages[0].update({}) }}",
    "append to messages": "{{ messages.append(1) }}",
    "not there": "{{ messages[5].content }}",
    "division": "{{ 1 / 0 }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(name: str) -> None:
    began = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateError) as caught:
        render(HOSTILE[name])
    assert len(caught.value.message) < 1000
    # Far from what these would take, and far from what they do take on a busy machine.
    assert time.process_time() - began < 10
    if sys.platform == "linux":
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ 1",
        "{% endfor %}",
        "{{ 'a'|no_such_filter }}",
        "{% include 'x' %}",
        "{% extends 'x' %}",
        "{% import 'x' as y %}",
        "{% autoescape true %}{% endautoescape %}",
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
        "{% for a in b %}" * 300 + "{% endfor %}" * 300,
        "{{ 1" + "+1" * 20_000 + " }}",
        "{{ " + "9" * 10_000 + " }}",
        "x" * 1_000_000,
    ],
)
def test_a_template_that_cannot_be_compiled(source: str) -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source)
    assert caught.value.param == "chat_template"


def test_constants_are_not_folded_at_compile_time() -> None:
    ChatTemplate("{{ 'a'|center(1000000000) }}{{ 'a' * 1000000000 }}{{ 9 ** 9 ** 9 }}")


def test_limits_grow_with_the_input() -> None:
    text = "word " * 2_000_000
    template = ChatTemplate(CHATML)
    assert text in template.render([{"role": "user", "content": text}])


def test_a_long_conversation_is_rendered() -> None:
    source = (
        "{% for m in messages[::-1] %}{% for n in messages[loop.index0 - 1:loop.index0 + 1] %}"
        "{% set x = n.content|trim %}{% endfor %}{% endfor %}{% set ns = namespace(all=[]) %}"
        "{% for m in messages %}{% set ns.all = ns.all + [m] %}{{ m.role + ': ' + m.content }}"
        "{% endfor %}{{ ns.all|length }}"
    )
    messages = [{"role": "user", "content": "Hello there. " * 20} for _ in range(500)]
    assert ChatTemplate(source).render(messages).endswith("500")


def test_what_a_check_raises_ends_a_render() -> None:
    class GivenUp(BaseException):  # as `trio.Cancelled` is
        pass

    def check() -> None:
        raise GivenUp

    source = "{% for i in range(20000) %}{% for j in range(20000) %}{% endfor %}{% endfor %}"
    with pytest.raises(GivenUp):
        ChatTemplate(source)._run([], {}, [], Limits(seconds=60, check=check))
