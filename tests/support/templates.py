"""The chat template of the bundled model."""

from pathlib import Path

TEMPLATE = (Path(__file__).parents[2] / "examples" / "bundled_model" / "template.jinja").read_text(
    encoding="utf-8"
)
