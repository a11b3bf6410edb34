"""The flags and variables of llama-server that trioserve does not implement.

There are two kinds. Some request what trioserve does anyway: these are accepted, with a note why
they have no effect. All others are rejected, so that no flag is silently ignored. The names are
those of the llama.cpp in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from functools import cache

import attrs

from trioserve.config.option import split_names
from trioserve.errors import ConfigError

# A flag on each line, written as `split_names` reads it, with a = before each name that is
# accepted. A line that begins with # says why those below it change nothing, or are refused.
_FLAGS = """
# timings are always measured
=--perf | =--no-perf LLAMA_ARG_PERF
# the model is not warmed up
=--warmup | =--no-warmup
# escapes are always processed
=-e =--escape | --no-escape
# llama.cpp no longer uses it
=-dt =--defrag-thold LLAMA_ARG_DEFRAG_THOLD
# one event loop serves all connections
=--threads-http LLAMA_ARG_THREADS_HTTP
# images are encoded one at a time, so that each can be cancelled
=--mtmd-batch-max-tokens LLAMA_ARG_MTMD_BATCH_MAX_TOKENS
# videos are read without the programs of ffmpeg
=--video-ffmpeg-dir LLAMA_ARG_VIDEO_FFMPEG_DIR
# a prompt always reuses the longest prefix in any slot or kept sequence
=-sps =--slot-prompt-similarity
# drafts are sampled on the CPU
--spec-draft-backend-sampling | =--no-spec-draft-backend-sampling LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING
# an output would depend on what the cache holds; see docs/configuration.md
--cache-reuse LLAMA_ARG_CACHE_REUSE
# models come from the hub or from an address; see -hf and -mu
-dr --docker-repo LLAMA_ARG_DOCKER_REPO
# threads are left to the operating system; use taskset and nice
-C --cpu-mask
-Cr --cpu-range
--cpu-strict
--prio
--poll
-Cb --cpu-mask-batch
-Crb --cpu-range-batch
--cpu-strict-batch
--prio-batch
--poll-batch
--spec-draft-cpu-mask -Cd --cpu-mask-draft
--spec-draft-cpu-range -Crd --cpu-range-draft
--spec-draft-cpu-strict --cpu-strict-draft
--spec-draft-prio --prio-draft
--spec-draft-poll --poll-draft
--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft
--spec-draft-cpu-strict-batch --cpu-strict-batch-draft
--spec-draft-prio-batch --prio-batch-draft
--spec-draft-poll-batch --poll-batch-draft
# one occurrence is enough: how much of the guesses was right decides how long they are
--spec-ngram-simple-min-hits
# ngram-simple has a map of the text, too
--spec-ngram-map-k-size-n
--spec-ngram-map-k-size-m
--spec-ngram-map-k-min-hits
--spec-ngram-map-k4v-size-n
--spec-ngram-map-k4v-size-m
--spec-ngram-map-k4v-min-hits
# n-grams are learned from requests, not from files
-lcs --lookup-cache-static
-lcd --lookup-cache-dynamic
# a draft is one line of guesses, not a tree
--spec-draft-p-split --draft-p-split LLAMA_ARG_SPEC_DRAFT_P_SPLIT
# drafts that are accepted at random make an output that is wrong
--spec-synth-len LLAMA_ARG_SPEC_SYNTH_LEN
--spec-synth-rates LLAMA_ARG_SPEC_SYNTH_RATES
# llama-server has removed it
--draft --draft-n --draft-max LLAMA_ARG_DRAFT_MAX
--draft-min --draft-n-min LLAMA_ARG_DRAFT_MIN
--spec-ngram-size-n
--spec-ngram-size-m
--spec-ngram-min-hits
"""  # noqa: E501


@attrs.frozen
class UnsupportedFlag:
    """A flag of llama-server that trioserve does not implement, with the reason."""

    names: tuple[str, ...]
    negative: tuple[str, ...]
    variable: str | None
    accepted: frozenset[str]  # names that have no effect; the others are rejected
    why: str


@cache
def table() -> tuple[UnsupportedFlag, ...]:
    """Return all flags of llama-server that trioserve refuses."""
    found = []
    why = ""
    for line in _FLAGS.strip().splitlines():
        if line.startswith("# "):
            why = line[2:]
        else:
            accepted = frozenset(word[1:] for word in line.split() if word.startswith("="))
            found.append(UnsupportedFlag(*split_names(line.replace("=", "")), accepted, why))
    return tuple(found)


@cache
def flags() -> Mapping[str, UnsupportedFlag]:
    """All flags by each of their names."""
    return {name: one for one in table() for name in (*one.names, *one.negative)}


@cache
def variables() -> Mapping[str, UnsupportedFlag]:
    """The flags with a variable, by its name."""
    return {one.variable: one for one in table() if one.variable is not None}


def note(flag: str, source: str, kind: str) -> str:
    """The note for an accepted flag without effect.

    `source` is the text from the user, such as a variable, and `kind` its kind.

    Raises:
        ConfigError: the flag is not supported.
    """
    found = flags()[flag]
    if flag in found.accepted:
        return f"{source} has no effect: {found.why}"
    raise ConfigError(
        f"{source} is a {kind} of llama-server that trioserve does not have yet: {found.why}"
    )


#: Words that all names of one kind share, and that therefore make no two of them alike.
_PREFIX = re.compile("LLAMA_ARG_|TRIOSERVE_|--?")

#: The similarity from which one name may be a slip of another; 1.0: they are the same.
_ALIKE = 0.75


def did_you_mean(name: str, *candidates: Collection[str]) -> str:
    """Suggest the nearest name from the first candidates that have one; empty if none has."""
    for names in candidates:
        by_word = {_PREFIX.sub("", one, count=1): one for one in names}
        word = _PREFIX.sub("", name, count=1)
        if near := difflib.get_close_matches(word, by_word, n=1, cutoff=_ALIKE):
            return f"; did you mean {by_word[near[0]]}?"
    return ""
