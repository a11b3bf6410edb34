"""The most that one request may hold. `docs/security.md` lists it, with what the limits are for.

All are far above what clients send. They keep what a request costs beside the model's work small.
"""

from __future__ import annotations

#: Candidates to report for each token. OpenAI's routes take fewer: `Config.max_logprobs`.
MAX_PROBS = 1024

#: Stop strings, and characters of one.
MAX_STOPS = 256
MAX_STOP_CHARS = 512

#: Pairs in `logit_bias`. Of them, those with text in place of a token id, and characters of one.
MAX_BIASES = 4096
MAX_TEXT_BIASES = 256
MAX_BIAS_CHARS = 256

MAX_SAMPLERS = 32

#: Strings at which DRY ends a repetition, and characters of one. Each is looked for in the whole
#: vocabulary.
MAX_BREAKERS = 32
MAX_BREAKER_CHARS = 64

MAX_ADAPTERS = 256
MAX_RESPONSE_FIELDS = 256

#: Prompts that are continued, texts for embeddings, and documents to rank.
MAX_PROMPTS = 256
MAX_INPUTS = 2048

#: Characters of a name: of a model, a tool, a file or a conversation that is looked up.
MAX_NAME = 1024

#: Uploaded files that a request names.
MAX_UPLOADS = 256

#: Conversations that are looked up at once.
MAX_LOOKUPS = 16384

#: Files beside the one with the gap.
MAX_EXTRA_FILES = 1024

#: Characters of a text to speak, as OpenAI has it, and of the name of a language.
MAX_SPEECH = 4096
MAX_LANGUAGE = 64

#: For `/tokenize` and `/detokenize`: characters or token ids.
MAX_TEXT = 8 * 2**20
MAX_TOKENS = 2**20

#: Characters of a text in a prompt or a message, and token ids of a prompt. The context of the
#: model has room for less.
MAX_PROMPT_CHARS = 32 * 2**20
MAX_PROMPT_TOKENS = 4 * 2**20

#: Characters of a file in base64, or of its URL. `--max-body-size` is less.
MAX_DATA = 2**30

#: Characters of `chat_template_kwargs`, as JSON, roughly.
MAX_TEMPLATE_KWARGS = 2**20

#: Characters of a schema or a grammar, as JSON. The compiler of grammars takes less.
MAX_SCHEMA = 4 * 2**20

#: Characters of the arguments of a tool, as JSON.
MAX_ARGUMENTS = 32 * 2**20

#: Names and patterns of the tools that the server runs, and characters of one. Each is compared
#: with the name of each tool.
MAX_RUN_TOOLS = 128
MAX_TOOL_PATTERN = 128

#: Characters of a path.
MAX_PATH = 4096

#: Pairs of `metadata`, and characters of a name and of a value: OpenAI's bounds.
MAX_METADATA = 16
MAX_METADATA_NAME = 64
MAX_METADATA_VALUE = 512

#: Names in a list of things to include.
MAX_INCLUDED = 64

#: Levels of nested JSON.
MAX_DEPTH = 128

#: Values in a body, roughly: its commas, those within short texts included.
MAX_VALUES = 2**21

#: Parts of a form with files, and bytes of its fields together, without the files.
MAX_FORM_PARTS = 256
MAX_FORM_FIELDS = 2**20

#: The shortest silence, in seconds, before a ping.
MIN_PING_INTERVAL = 0.1
