"""Each type of drafts for each architecture of the list: the output is that without drafts."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from tests.support.architectures import LAYERS
from tests.support.drafted import WINDOWED, Drafted, plain, settings_for, write_head
from tests.support.head_architectures import DFLASH, EAGLE3
from tests.support.head_models import write_block, write_for, write_read
from tests.support.hybrid_architectures import DEEPSEEK4_DSPARK
from trioserve.models.head_families import FAMILIES, LAYER_TYPES

pytestmark = pytest.mark.system

PROMPTS = [f"{i} {words}" for i in range(4) for words in ("Once upon a time", "The red ball is")]
PAIRS = [
    (spec_type, one.arch)
    for one in FAMILIES.values()
    for spec_type in ("draft-mtp", *LAYER_TYPES)
    if one.takes(spec_type)
]


@pytest.mark.parametrize(("spec_type", "arch"), PAIRS)
def test_the_output_is_the_same_in_one_slot_and_in_eight(
    spec_type: str, arch: str, tmp_path: Path
) -> None:
    model, head = write_for(tmp_path, spec_type, arch)
    settings = settings_for(model, spec_type, head, has_window=arch in WINDOWED)
    expected = plain(settings | {"parallel": 8, "ctx_size": 4096}, PROMPTS, 24)
    for parallel in (1, 8):
        bench = Drafted(settings, parallel=parallel, ctx_size=512 * parallel, trial_load=False)
        for i, prompt in enumerate(PROMPTS[:parallel]):
            bench.submit(i, prompt, 24)
        bench.run()
        bench.backend.close()
        assert [bench.tokens[i] for i in range(parallel)] == expected[:parallel]
        assert all(end.timings.draft_n for end in bench.finished.values())


@pytest.mark.parametrize(
    ("spec_type", "arch"),
    [
        ("draft-eagle3" if one.gives_last else "draft-dflash", one.arch)
        for one in FAMILIES.values()
        if one.gives_last or one.gives_end
    ],
)
def test_a_head_that_reads_what_comes_out_of_the_last_layer(
    spec_type: str, arch: str, tmp_path: Path
) -> None:
    shape = EAGLE3 if spec_type == "draft-eagle3" else DFLASH
    layers = (1, 2, LAYERS) if spec_type == "draft-eagle3" else (2, LAYERS)
    reads_last = attrs.evolve(shape, metadata={**shape.metadata, "target_layers": layers})
    head = write_block(tmp_path, reads_last)
    model = write_read(tmp_path, arch)
    settings = settings_for(model, spec_type, head, has_window=arch in WINDOWED)
    bench = Drafted(settings)
    bench.submit(0, PROMPTS[0], 40)
    bench.run()
    bench.backend.close()
    assert [bench.tokens[0]] == plain(settings, PROMPTS[:1], 40)
    assert bench.finished[0].timings.draft_n


def test_dspark_with_layers_of_deepseek_v4(tmp_path: Path) -> None:
    head = write_block(tmp_path, DEEPSEEK4_DSPARK)
    model = write_read(tmp_path, "deepseek4")
    settings = settings_for(model, "draft-dspark", head, has_window=False)
    bench = Drafted(settings)
    for i, prompt in enumerate(PROMPTS[:3]):
        bench.submit(i, prompt, 40)
    bench.run()
    bench.backend.close()
    assert [bench.tokens[i] for i in range(3)] == plain(settings, PROMPTS[:3], 40)
    assert all(end.timings.draft_n for end in bench.finished.values())


@pytest.mark.parametrize("kind", ["glm4moe", "step35", "qwen35"])
def test_heads_in_a_file_of_their_own(kind: str, tmp_path: Path) -> None:
    counts, texts = [], []
    for is_apart in (False, True):
        settings = write_head(tmp_path / str(is_apart), kind, is_good=True, is_apart=is_apart)
        bench = Drafted(settings, parallel=1)
        bench.submit(0, PROMPTS[0], 60)
        bench.run()
        bench.backend.close()
        texts.append(bench.tokens[0])
        counts.append(bench.n_accepted)
    assert texts[0] == texts[1]
    assert counts[0] == counts[1] > 10
