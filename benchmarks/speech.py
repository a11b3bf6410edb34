"""Speech: the time to the first sound, and how much of it a second brings, by speakers at once.

    python -m benchmarks.speech --tts pocket-tts.gguf

Each speaker is a client that has one text spoken as ``pcm``. Without ``--tts``, it is the bundled
voice.
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import attrs

from benchmarks import report
from benchmarks.servers import Flags, Target, TargetError, exit_on_sigterm, running, trioserve

TEXT = "One two three. Four five six seven. Eight nine. Three one four one five nine."

#: Bytes of a second of ``pcm``.
_SECOND = 2 * 24_000


@attrs.frozen
class Spoken:
    """A text that was spoken: seconds until its first sound, and of all of its sound."""

    first: float
    sound: float


def speak(target: Target, seed: int, text: str = TEXT) -> Spoken:
    """Have a text spoken.

    Raises:
        TargetError: the answer is another one.
    """
    fields = {"input": text, "response_format": "pcm", "seed": seed}
    connection = http.client.HTTPConnection(target.address.host, target.address.port, timeout=600)
    began = time.perf_counter()
    connection.request("POST", "/v1/audio/speech", json.dumps(fields))
    response = connection.getresponse()
    data = response.read(1)
    first = time.perf_counter() - began
    data += response.read()
    connection.close()
    if response.status != 200:
        raise TargetError(f"{target.name}: HTTP {response.status}: {data[:200]!r}")
    return Spoken(first, len(data) / _SECOND)


def measure(target: Target, speakers: int, rounds: int) -> list[str]:
    """Measure some speakers at once; returns a row of the table."""
    found, rates = list[Spoken](), list[float]()
    with ThreadPoolExecutor(speakers) as pool:
        for n in range(rounds):
            began = time.perf_counter()
            seeds = range(n * speakers, (n + 1) * speakers)
            said = [*pool.map(lambda seed: speak(target, seed), seeds)]
            rates.append(sum(one.sound for one in said) / (time.perf_counter() - began))
            found += said
    firsts = [1e3 * one.first for one in found]
    return [str(speakers), f"{median(firsts):.0f}", f"{max(firsts):.0f}", f"{median(rates):.2f}"]


def main() -> int:
    """Print the table."""
    parser = report.arguments("speech", __doc__)
    parser.add_argument("--model", type=Path, help="the model for chats; default: the bundled one")
    parser.add_argument("--tts", type=Path, metavar="FILE", help="default: the bundled voice")
    parser.add_argument("--speakers", type=report.counts, default=[1, 2, 4, 8], metavar="N,…")
    parser.add_argument("--rounds", type=report.bounded(1, 100), default=5)
    options = parser.parse_args()
    exit_on_sigterm()
    more = () if options.tts is None else ("--tts", str(options.tts.resolve()))
    flags = Flags(model=options.model or Path("bundled"), slots=max(options.speakers), more=more)
    rows = [["speakers", "first sound p50, ms", "greatest, ms", "seconds of sound a second"]]
    with (
        tempfile.TemporaryDirectory() as scratch,
        running(trioserve(), flags, Path(scratch) / "log") as target,
    ):
        speak(target, 0)  # the first one loads the encoder
        rows += [measure(target, n, options.rounds) for n in options.speakers]
    print(report.markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
