"""The number of token ids in the files of a tokenizer, read without the tokenizers library."""

import json
from pathlib import Path
from typing import Any

from titanlite.config.regular_file import read_file

LARGEST_FILE, MOST_IDS = 2**26, 2**20
"""Maximum size of a tokenizer.json in bytes, and of a tokenizer in ids; published ones have at most half of either."""


def n_token_ids(path: Any) -> int:
    """Return 1 + the largest id in a tokenizer.json or in its folder; 0 if unreadable (a later check reports it)."""
    try:
        file = Path(path).expanduser()
        content = json.loads(read_file(file / "tokenizer.json" if file.is_dir() else file, LARGEST_FILE))
        vocabulary = content["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        n = 1 + max([-1, *ids, *(token["id"] for token in content.get("added_tokens") or ())])
        return n if type(n) is int and n <= MOST_IDS else 0
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, MemoryError):
        return 0
