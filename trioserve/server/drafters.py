"""The drafters that a configuration asks for and that need no model."""

from __future__ import annotations

from trioserve.config import ModelConfig
from trioserve.engine import Drafter, NgramDrafter, NgramRules


def ngram_drafters(config: ModelConfig) -> list[Drafter]:
    """Make the drafters that guess from n-grams, in the order in which they are to be asked."""
    rules = {
        "ngram-simple": NgramRules(
            name="ngram-simple",
            n=config.spec_ngram_simple_size_n,
            n_max=config.spec_ngram_simple_size_m,
        ),
        "ngram-mod": NgramRules(
            name="ngram-mod",
            n=config.spec_ngram_mod_n_match,
            n_min=config.spec_ngram_mod_n_min,
            n_max=config.spec_ngram_mod_n_max,
            shared=True,
        ),
    }
    return [NgramDrafter(rules[name]) for name in config.draft_types if name in rules]
