"""Turns a chat request into a prompt with sampling parameters, and says how its answers are to be read.

Called by the routes that take conversations: `chat`, and also `responses` and `messages`, which make a chat
request of each of their requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from penstock.request import SamplingParams, StructuredOutputs
from penstock.server.answers.generation import Sequence
from penstock.server.engine_port import ServedModel
from penstock.server.openai.chat_options import opens_reasoning, reading_of, shown_markers, template_options
from penstock.server.openai.custom_tools import InputGrammar, with_inputs
from penstock.server.openai.message_reader import Reading
from penstock.server.openai.openai_types import ChatRequest
from penstock.server.openai.sampling import chat_sampling, check_choices, fit_to_context, output_field
from penstock.server.openai.structured import behind_reasoning, in_place_of_calls, structured_field
from penstock.server.openai.tools import ToolUse, bound_schemas, grammar_of, tool_use
from penstock.server.routes.grammar_checks import GrammarChecks
from penstock.server.routes.intake import Intake

NO_INPUTS: Mapping[str, InputGrammar] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadChat:
    """A chat request that was read.

    Attributes:
        sequence: the prompt, and how its continuations are sampled.
        reading: how the answers are read; None: all of their text is content.
        unused: fields that have no effect on this model.
    """

    sequence: Sequence
    reading: Reading | None
    unused: list[str]


class ChatReader:
    """Reads conversations, and has their grammars checked; one for the server."""

    def __init__(self, intake: Intake, grammars: GrammarChecks) -> None:
        self._intake = intake
        self._grammars = grammars

    async def read(self, request: ChatRequest, inputs: Mapping[str, InputGrammar] = NO_INPUTS) -> ReadChat:
        """Return what the request asks for, after all its grammars were checked.

        Args:
            inputs: grammars of the texts of custom tools, by the tool's name.

        Raises:
            InvalidRequestError: a field is wrong, or a grammar cannot be used; the error names the field.
            OverloadedError: too many texts or grammars wait.
        """
        intake, grammars = self._intake, self._grammars
        model = intake.model
        sampling = chat_sampling(request, model, intake.limits, open_objects=intake.open_objects)
        check_choices(sampling, 1, intake.limits)
        use, options, unused = self._beside_messages(request)
        prompt = await intake.prompts.chat(request.messages, use, options)
        is_open = opens_reasoning(request, prompt, model)
        reading = reading_of(request, use, model.syntax, is_open=is_open)
        asked_by = structured_field(request)
        text = in_place_of_calls(sampling, use, model.syntax, asked_by)
        if use.choice in ("none", "auto"):  # else the answer has calls alone, and no such text
            await grammars.check_sampling(sampling, asked_by)
        schemas = bound_schemas(use)
        grammar, unbound = await self._grammar(use, schemas, inputs, is_open=is_open, text=text)
        if grammar is None:
            grammar = behind_reasoning(sampling, model.syntax, asked_by, is_open=is_open)
        else:
            asked_by = "tools"
        for param, schema in schemas.items():
            grammars.check_schema(schema, param)
        made = None if grammar is None else self._made_grammar(grammar, sampling)
        sampling = _for_reading(sampling, reading, model, made)
        if made is not None:
            await grammars.check_made(made, asked_by)
        return ReadChat(
            sequence=self._sequence(request, prompt, sampling), reading=reading, unused=unused + unbound
        )

    async def _grammar(
        self,
        use: ToolUse,
        schemas: Mapping[str, str],
        inputs: Mapping[str, InputGrammar],
        *,
        is_open: bool,
        text: StructuredOutputs | None,
    ) -> tuple[str | None, list[str]]:
        """Return what `with_inputs` does, for the grammar that `grammar_of` returns."""
        for given in inputs.values():
            await self._grammars.check_given(given.given, given.where)

        def made() -> tuple[str | None, list[str]]:
            grammar = grammar_of(use, self._intake.model.syntax, is_open=is_open, text=text)
            return with_inputs(grammar, use, inputs)

        size = sum(map(len, schemas.values())) + sum(given.size for given in inputs.values())
        return await self._intake.workers.run(size, made)

    async def render(self, request: ChatRequest) -> tuple[str, Sequence, list[str]]:
        """Return the text that the template makes, the sequence, and the fields without effect.

        No grammar is checked. Errors are as in `read`.
        """
        prompts = self._intake.prompts
        intake = self._intake
        sampling = chat_sampling(request, intake.model, intake.limits, open_objects=intake.open_objects)
        use, options, unused = self._beside_messages(request)
        prompt = await prompts.chat(request.messages, use, options)
        sequence = self._sequence(request, prompt, sampling)
        return await prompts.chat_text(request.messages, use, options), sequence, unused

    async def prompt(self, request: ChatRequest) -> tuple[list[int], list[str]]:
        """Return the ids of the prompt, and the fields without effect; the sampling fields are checked too.

        The prompt may be longer than the model's context.
        """
        intake = self._intake
        chat_sampling(request, intake.model, intake.limits, open_objects=intake.open_objects)
        use, options, unused = self._beside_messages(request)
        return await intake.prompts.chat(request.messages, use, options), unused

    def _beside_messages(self, request: ChatRequest) -> tuple[ToolUse, dict[str, Any], list[str]]:
        """Return tools and options for the chat template, and the fields that have no effect on it."""
        syntax, limits = self._intake.model.syntax, self._intake.limits
        return tool_use(request, syntax, limits), *template_options(request, syntax, limits)

    def _made_grammar(self, grammar: str, sampling: SamplingParams) -> StructuredOutputs:
        """Return a grammar of calls or reasoning as structured output.

        Its schemas leave objects open as the rest of the request does.
        """
        asked = sampling.structured_outputs
        open_objects = self._intake.open_objects if asked is None else asked.open_objects
        return StructuredOutputs(grammar=grammar, open_objects=open_objects)

    def _sequence(self, request: ChatRequest, prompt: list[int], sampling: SamplingParams) -> Sequence:
        fitted = fit_to_context(
            sampling,
            len(prompt),
            self._intake.max_model_len,
            default=None,
            prompt_field="messages",
            output_field=output_field(request),
        )
        return Sequence(prompt_token_ids=prompt, sampling=fitted)


def _for_reading(
    sampling: SamplingParams, reading: Reading | None, model: ServedModel, made: StructuredOutputs | None
) -> SamplingParams:
    """Return the sampling parameters of an answer whose text shows its markers, and that follows a grammar.

    Args:
        reading: how the answer is read.
        made: the grammar; None: the structured output stays as it is.
    """
    changes: dict[str, Any] = {}
    if markers := shown_markers(reading, model.syntax):
        changes["shown_special_tokens"] = markers
    if made is not None:
        changes["structured_outputs"] = made
    changed = msgspec.structs.replace(sampling, **changes)
    changed.validate(model.vocab_size)
    return changed
