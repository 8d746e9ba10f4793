"""The demo model with the markers of families that think aloud and call tools, and with their templates.

The markers take the place of the last words of its vocabulary, so that the weights stay as they are.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from penstock.families.registry import resolve_model_directory

# Whether they are special tokens, as in the families' own tokenizers. [THINK] stays a text of several tokens.
_MARKERS = {
    "<think>": False,
    "</think>": False,
    "<tool_call>": False,
    "</tool_call>": False,
    "[TOOL_CALLS]": True,
    "[ARGS]": True,
    "<|python_tag|>": True,
}
_FIRST = 1024 - len(_MARKERS)
IDS = {marker: _FIRST + index for index, marker in enumerate(_MARKERS)}
END = 1
_PAIR = '{"name": "{{ call.function.name }}", "KEY": {{ call.function.arguments | tojson }}}'
_ARGUMENTS = _PAIR.replace("KEY", "arguments")


class Family(NamedTuple):
    """What a template of the family says.

    Attributes:
        call: a former call.
        begin: how an answer begins.
        notes: what else stands in it.
    """

    call: str
    begin: str = ""
    notes: str = ""

    @property
    def template(self) -> str:
        calls = "{% for call in message.tool_calls %}" + self.call + "{% endfor %}"
        return (
            "{# "
            + self.notes
            + " #}{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
            + "{% for message in messages %}"
            + "<|{{ 'user' if message.role == 'tool' else message.role }}|>{{ message.content }}"
            + "{% if message.tool_calls %}"
            + calls
            + "{% endif %}<|end|>{% endfor %}"
            + "{% if add_generation_prompt %}<|assistant|>"
            + self.begin
            + "{% endif %}"
        )


FAMILIES = {
    "hermes": Family(
        call=f"<tool_call>\n{_ARGUMENTS}\n</tool_call>",
        begin="{% if thinking is defined %}{{ '<think>' if thinking else '<think></think>' }}{% endif %}",
    ),
    "mistral": Family(call=f"[TOOL_CALLS] [{_ARGUMENTS}]", notes="[THINK]"),
    "mistral_args": Family(
        call="[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    ),
    "llama3_json": Family(call=_PAIR.replace("KEY", "parameters"), notes="<|start_header_id|>"),
}


def make_marked_model(directory: Path, family: str) -> Path:
    """A copy of the demo model; `write_template` makes it another family's."""
    shutil.copytree(resolve_model_directory("demo"), directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    for word in [word for word, token_id in model["vocab"].items() if token_id >= _FIRST]:
        del model["vocab"][word]
    del model["merges"][-len(_MARKERS) :]
    shape = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": IDS[marker], "content": marker, "special": special, **shape}
        for marker, special in _MARKERS.items()
    ]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    write_template(directory, family)
    return directory


def write_template(directory: Path, family: str) -> None:
    """It is read when an API process starts."""
    (directory / "chat_template.jinja").write_text(FAMILIES[family].template, encoding="utf-8")
