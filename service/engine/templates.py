"""A chat template of the operator's own in the place of a model's; knows files and tokenizers.

The template is a part of the cache's identity, so what was computed under another is never found,
even where the tokens are the same.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import TemplateError, TemplateSyntaxError

from radixkv.errors import InvalidConfig
from radixkv.service.engine.fingerprints import digest_template

if TYPE_CHECKING:
    from radixkv.service.engine.loading import LoadedModel

MAX_TEMPLATE_BYTES = 2**20


def read_template(file: str) -> str:
    """Return the text of a template file; raises InvalidConfig naming it."""
    path = Path(file).expanduser()
    try:
        raw = path.read_bytes()
        text = raw.decode()
    except FileNotFoundError:
        raise InvalidConfig(f"chat_template is {file!r}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidConfig(f"chat_template {file} cannot be read: {e}") from e
    if not text.strip() or len(raw) > MAX_TEMPLATE_BYTES:
        what = "empty" if not text.strip() else f"larger than {MAX_TEMPLATE_BYTES} bytes"
        raise InvalidConfig(f"chat_template {file} is {what}")
    return text


def with_template(loaded: LoadedModel, template: str, file: str) -> LoadedModel:
    """Return ``loaded`` with another chat template; the given one is left as it is.

    Raises InvalidConfig if the template is no Jinja. ``file`` is what errors call it.
    """
    tokenizer = copy.copy(loaded.tokenizer)
    tokenizer.chat_template = template
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    except TemplateSyntaxError as e:
        raise InvalidConfig(f"chat_template {file} is no Jinja: {e} (line {e.lineno})") from e
    except (TemplateError, TypeError, ValueError, KeyError):
        pass  # it wants another chat than this one
    return replace(
        loaded,
        tokenizer=tokenizer,
        fingerprints=replace(loaded.fingerprints, template=digest_template(template)),
        _identities={},
    )
