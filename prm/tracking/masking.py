"""What may leave the machine in a tracking record: names that MLflow takes, parameters flattened, secrets left out."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

# A whole word of the key: `hf_token` and `api_key` are secrets, `max_new_tokens` and `tokenizer` are not.
_SECRET_WORD = re.compile(
    r"(^|[^a-z0-9])"
    r"(token|secrets?|passwords?|passwd|pwd|credentials?|(api|access|private|secret)[^a-z0-9]?keys?"
    r"|apikeys?|(auth|api|access|bearer|hf|refresh)[^a-z0-9]?tokens?)"
    r"($|[^a-z0-9])"
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_USER_INFO = re.compile(r"\b([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s?#]*@")
_QUERY_SECRET = re.compile(
    r"([?&](?:token|access_token|api_?key|key|secret|password|sig|signature)=)[^&\s#]+", re.IGNORECASE
)
_NAME_CHARACTERS = re.compile(r"[^\w.\-]+", re.ASCII)
_MAX_NAME = 250


def is_secret(key: str) -> bool:
    """Whether a key names a token, secret, password, API key or credential."""
    return _SECRET_WORD.search(_CAMEL.sub("_", key).lower()) is not None


def strip_credentials(text: str) -> str:
    """`scheme://user:password@host` becomes `scheme://host`, wherever it stands; secret query values become `***`."""
    return _QUERY_SECRET.sub(r"\1***", _USER_INFO.sub(r"\1", text))


def command_line(arguments: Sequence[str]) -> str:
    """A shell line of these arguments without the values of secret flags and without credentials in URIs."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide_next:
            shown.append("***")
            hide_next = False
        elif argument.startswith("-") and is_secret(name):
            shown.append(f"{name}=***" if equals else name)
            hide_next = not equals
        else:
            shown.append(strip_credentials(argument))
    return shlex.join(shown)


def without_secrets(value: Any) -> tuple[Any, list[str]]:
    """A nested value without its secret entries, and the dotted names of the entries that were left out."""
    left_out: list[str] = []

    def clean(item: Any, place: str) -> Any:
        if isinstance(item, Mapping):
            kept = {}
            for key, inner in item.items():
                name = f"{place}.{key}" if place else str(key)
                if is_secret(str(key)):
                    left_out.append(name)
                else:
                    kept[str(key)] = clean(inner, name)
            return kept
        if isinstance(item, (list, tuple)):
            return [clean(inner, f"{place}.{index}") for index, inner in enumerate(item)]
        return strip_credentials(item) if isinstance(item, str) else item

    return clean(value, ""), left_out


def flatten(params: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Nested parameters as MLflow takes them: dotted names, text values; and the names left out as secrets.

    Lists stand as JSON. Names are sanitised like metric names.

    >>> flatten({"model": {"lr": 0.1, "sizes": [1, 2]}, "hf_token": "x"})
    ({'model.lr': '0.1', 'model.sizes': '[1, 2]'}, ['hf_token'])
    """
    cleaned, left_out = without_secrets(params)
    flat: dict[str, str] = {}

    def walk(item: Any, place: str) -> None:
        if isinstance(item, Mapping) and item:
            for key, inner in item.items():
                walk(inner, f"{place}.{key}" if place else str(key))
        elif isinstance(item, (Mapping, list)):
            flat[metric_name(place)] = json.dumps(item, default=str)
        else:
            flat[metric_name(place)] = strip_credentials(str(item))

    walk(cleaned, "")
    return flat, left_out


def metric_name(name: str) -> str:
    """A name that MLflow takes: letters, digits, `_ . -` and single slashes; what else stood there becomes `_`.

    >>> metric_name("pref_lamp/guided[lore]/rouge1")
    'pref_lamp/guided_lore/rouge1'

    Raises:
        ValueError: nothing is left, or the name is longer than 250 characters.
    """
    parts = []
    for part in name.split("/"):
        cleaned = _NAME_CHARACTERS.sub("_", part)
        if cleaned != part:
            cleaned = cleaned.strip("_")
        if cleaned.strip("."):
            parts.append(cleaned)
    result = "/".join(parts)
    if not result:
        raise ValueError(f"{name!r} has no letter or digit that a metric name could keep")
    if len(result) > _MAX_NAME:
        raise ValueError(f"the metric name {result[:60]}... has {len(result)} characters, {_MAX_NAME} are allowed")
    return result
