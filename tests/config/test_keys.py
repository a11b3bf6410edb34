"""The file of API keys."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, strategies as st

from trioserve.config.keys import Key, digest_of, parse_keys
from trioserve.errors import ConfigError

HASH = f'hash = "sha256:{digest_of("a").hex()}"'
OTHER = f'hash = "sha256:{digest_of("b").hex()}"'


def test_a_key_with_everything() -> None:
    text = f"""
    # Alice's laptop
    [alice]
    {HASH}
    manage = true
    models = ["qwen3-*", "gemma"]
    requests-per-minute = 10
    tokens-per-minute = 0
    tokens-per-day = 1000
    priority = 5
    weight = 2
    """
    (key,) = parse_keys(text, "keys.toml")
    assert key == Key(
        name="alice",
        digest=digest_of("a"),
        may_manage=True,
        models=("qwen3-*", "gemma"),
        requests=10,
        tokens=0,
        daily_tokens=1000,
        priority=5,
        weight=2.0,
    )
    assert key.may_use("x", "qwen3-8b") and key.may_use("gemma")
    assert not key.may_use("gemma3") and not key.may_use()


def test_defaults() -> None:
    assert parse_keys("", "keys.toml") == ()
    keys = parse_keys(f"[a]\n{HASH}\n[b]\n{OTHER}\nmodels = []", "keys.toml")
    assert keys[0] == Key(name="a", digest=digest_of("a"))
    assert keys[0].may_use("anything") and not keys[1].may_use("anything")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[a", "at end of document"),
        (f"[a]\n{HASH}\n[a]\n{HASH}", "line 3"),
        ("a = 3", "k.toml:1: key 'a' must be a table"),
        ("\n[a]\nmanage = true", "k.toml:2: key 'a' has no hash"),
        (f"[a]\n{HASH}\nlimit = 3", "k.toml:3: limit of the key 'a' is unknown"),
        (f"[a]\n{HASH}\nweigth = 3", "did you mean weight"),
        (f"[b]\n{HASH}\n[a]\n{OTHER}\nmanage = 1", "k.toml:5: manage of the key 'a' must be true"),
        (f"[b]\n{HASH}\nweight = 1\n['a']\n{OTHER}\nweight = 0", "k.toml:6: weight of the key 'a'"),
        (f"[a]\n{HASH}\nweight = inf", "from 0.001 to 1000, not inf"),
        (f"[a]\n{HASH}\npriority = 101", "an integer from 0 to 100, not 101"),
        (f"[a]\n{HASH}\npriority = true", "not True"),
        (f"[a]\n{HASH}\ntokens-per-day = -1", "not -1"),
        (f"[a]\n{HASH}\nmodels = 'x'", "a list of names of models"),
        (f"[a]\n{HASH}\nmodels = ['']", "a list of names of models"),
        (f"[a]\n{HASH}\n[b]\n{HASH}", "k.toml:4: hash of the key 'b' is that of a, too"),
        (f'[a]\nhash = "sha256:{digest_of("").hex()}"', "of an empty key"),
        (f"['a b']\n{HASH}", "k.toml:1: key 'a b' must have a name of at most 64"),
        (f"[{'a' * 65}]\n{HASH}", "must have a name of at most 64"),
        (f"[key-1]\n{HASH}", "has the name of a key of --api-key"),
        ("a = [" * 5000, "not valid TOML"),
        (f"[a]\n{HASH}\npriority = {'9' * 5000}", "not valid TOML"),
    ],
)
def test_errors_name_the_place(text: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(text, "k.toml")
    assert caught.value.message.startswith("k.toml")
    assert place in caught.value.message


def test_a_key_in_the_place_of_its_hash_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys('[a]\nhash = "ts-my-secret"', "k.toml")
    assert "secret" not in caught.value.message and "k.toml:2" in caught.value.message


JSON = st.recursive(
    st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
FIELDS = st.sampled_from([
    "hash", "manage", "models", "requests-per-minute", "tokens-per-minute", "tokens-per-day",
    "priority", "weight", "other",
])  # fmt: skip


@given(st.dictionaries(st.text(max_size=8), st.dictionaries(FIELDS, JSON), max_size=3), st.data())
def test_any_file_is_read_or_refused(
    tables: dict[str, dict[str, object]], data: st.DataObject
) -> None:
    """Keys have the values of the file, in the ranges that the server relies on."""
    lines = []
    for i, (name, fields) in enumerate(tables.items()):
        if data.draw(st.booleans()):
            fields["hash"] = f"sha256:{digest_of(str(i)).hex()}"
        lines.append(f"[{_toml(name)}]")
        lines += (f"{field} = {_toml(value)}" for field, value in fields.items())
    try:
        keys = parse_keys("\n".join(lines), "k.toml")
    except ConfigError:
        return
    for key, (name, fields) in zip(keys, tables.items(), strict=True):
        assert key.name == name and fields.keys() <= {*_READ, "hash"}
        assert 0 <= key.priority <= 100 and 0.001 <= key.weight <= 1000 and key.daily_tokens >= 0
        assert key.may_manage is fields.get("manage", False)
        assert key.tokens == fields.get("tokens-per-minute")


_READ = ("manage", "models", "requests-per-minute", "tokens-per-minute", "tokens-per-day",
         "priority", "weight")  # fmt: skip


def _toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value) if "e" not in repr(value) else f"{value:.3f}"
    return json.dumps(value).replace("\x7f", "\\u007f")


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_keys(text, "k.toml")
