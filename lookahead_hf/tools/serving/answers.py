"""Changes what transformers' server answers: our fields, the ends of texts, several choices."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from lookahead_hf.stats import SourceStats, SpeculativeStats, joined
from lookahead_hf.tools.serving.fields import ServedRequest, as_error, error

_EVENT = b"data: "
FAILED = "the server failed at this request: its log says why"


def as_json(value: Any) -> bytes:
    """Return a value as JSON without spaces, in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class Answer:
    """What a client gets: the answer to one request, or those to several as choices of one answer.

    Attributes:
        requests: The requests.
        has_started: Whether the status was sent.
        has_ended: Whether all was sent.
        is_stream: Whether it is sent as a stream.
    """

    def __init__(self, requests: Sequence[ServedRequest], num_prompts: int = 1) -> None:
        """`num_prompts`: how many prompts the requests have, one after the other."""
        self.requests, self._each = requests, len(requests) // num_prompts
        self.has_started = self.has_ended = self.is_stream = False
        self._answers: dict[int, dict[str, Any]] = {}  # with the usage, by the request's place

    @property
    def is_joined(self) -> bool:
        """Whether it has the choices of several requests."""
        return len(self.requests) > 1

    @property
    def is_complete(self) -> bool:
        """Whether nothing but one request's answer, or nothing at all, is missing."""
        return not self.is_joined or len(self._answers) == len(self.requests)

    def end(self, why: str | None = None, status: int = 400) -> None:
        """Give all requests up."""
        for each in self.requests:
            each.end(why, status)

    def join(self, request: ServedRequest, whole: dict[str, Any], is_stream: bool) -> bytes:
        """Return what to send of a request's answer, or of an event of its stream."""
        if not self.is_joined:
            return as_json(whole)
        at = self.requests.index(request)
        for choice in whole.get("choices") or ():
            choice["index"] = at
        if not whole.get("usage"):
            return as_json(whole)
        self._answers[at] = whole
        sums = as_json(self._sums(is_stream)) if self.is_complete else b""
        if not is_stream:
            return sums
        whole = {name: value for name, value in whole.items() if name not in ("usage", "metrics")}
        shown = as_json(whole)
        return b"\n\n".join([shown, *([_EVENT + sums] if sums else [])])

    def _sums(self, is_stream: bool) -> dict[str, Any]:
        answers = [self._answers[at] for at in range(len(self.requests))]
        of_prompts = sum(each["usage"]["prompt_tokens"] for each in answers[:: self._each])
        written = sum(each["usage"]["completion_tokens"] for each in answers)
        usage = {"prompt_tokens": of_prompts, "completion_tokens": written}
        usage["total_tokens"] = of_prompts + written
        choices = [] if is_stream else [choice for each in answers for choice in each["choices"]]
        whole = {**answers[0], "usage": usage, "choices": choices}
        found = [each.stats for each in self.requests if each.stats is not None]
        stats = reduce(joined, found) if found else None
        add_fields(whole, ServedRequest(prediction=self.requests[0].prediction, stats=stats))
        return whole


class Reply:
    """Sends the answer to a request with its statistics, a stream from its first token on.

    Until then `generate` may refuse its arguments, and the client gets an ordinary error.
    """

    def __init__(self, request: ServedRequest, send: Send, answer: Answer, holds: bool) -> None:
        """`holds`: whether the answer is a text, of which a stream waits for the first token."""
        self._request, self._send, self._answer = request, send, answer
        self._holds = holds
        self._start: Message = {}
        self._held = b""
        self._end = TextEnd(request.stop)
        self._num_places = self._shown = 0

    async def __call__(self, message: Message) -> None:
        answer, request = self._answer, self._request
        if answer.has_ended:
            return
        if message["type"] == "http.response.start":
            self._start, self._headers = message, MutableHeaders(scope=message)
            return
        is_last = not message.get("more_body", False)
        self._held += message.get("body", b"")
        is_stream = self._headers.get("content-type", "").startswith("text/event-stream")
        status = min(self._start["status"], 599)
        if not is_last and not (is_stream and (request.has_begun or not self._holds)):
            return
        if request.refusal is not None and not answer.has_started:
            return
        body, self._held = self._changed(self._held, is_stream), b""
        if status >= 400:
            body, status = as_error(body), 400 if status == 422 else status
            if answer.is_joined:
                answer.end(json.loads(body)["error"]["message"], status)
        if request.refusal is not None and request.is_cancelled:
            return  # it is told in the end
        is_last &= answer.is_complete
        if answer.is_joined and not body and not is_last:
            return  # the other choices are missing
        if not answer.has_started:
            answer.has_started, answer.is_stream = True, is_stream
            self._start["status"] = status
            if not is_stream:
                self._headers["content-length"] = str(len(body))
            await self._send(self._start)
        answer.has_ended = is_last
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def refuse(self, why: str, status: int = 400, code: str | None = None) -> None:
        """End the answer with an error: that of a stream which has begun is its last event."""
        if self._answer.has_ended:
            return
        self._answer.has_ended = True
        self._answer.end()
        body = as_json(error(why, code, status))
        if self._answer.has_started and not self._answer.is_stream:
            return  # the server closes the connection
        if self._answer.has_started:
            body = _EVENT + body + b"\n\n"
        else:
            size = str(len(body)).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", size)]
            if status in (429, 503):
                headers.append((b"retry-after", b"5"))
            start = {"type": "http.response.start", "status": status, "headers": headers}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _changed(self, body: bytes, is_stream: bool) -> bytes:
        """Return an answer, or events of a stream, with our fields and without what is cut."""
        if not is_stream:
            return self._changed_one(body, is_stream)
        known = b'"usage"' in body or b'data: {"error"' in body
        if not known and not self._changes_choices:
            return body
        return b"\n\n".join(
            _EVENT + self._changed_one(event[len(_EVENT) :], is_stream)
            if event.startswith(_EVENT)
            else event
            for event in body.split(b"\n\n")
        )

    def _changed_one(self, answer: bytes, is_stream: bool) -> bytes:
        if answer.startswith(b'{"error": "'):  # of transformers, which does not escape it
            why = self._request.refusal or FAILED
            if self._answer.is_joined:
                self._answer.end(why, 500)
            return as_json(error(why, None, 500))
        try:
            whole = json.loads(answer)
        except ValueError:
            return answer
        if not isinstance(whole, dict):
            return answer
        is_changed = add_fields(whole, self._request)
        for choice in whole.get("choices") or () if self._changes_choices else ():
            is_changed = True
            if self._request.unfinished_end and choice.get("finish_reason") is not None:
                part = choice if "text" in choice else choice.setdefault("delta", {})
                name = "text" if "text" in choice else "content"
                part[name] = (part.get(name) or "") + self._request.unfinished_end
            if self._request.stop:
                self._end.cut(choice)
            if self._request.log_probs is not None:
                self._add_log_probs(choice)
        is_changed |= self._answer.is_joined
        return self._answer.join(self._request, whole, is_stream) if is_changed else answer

    @property
    def _changes_choices(self) -> bool:
        return bool(
            self._request.stop
            or self._request.unfinished_end
            or self._request.log_probs is not None
            or self._answer.is_joined
        )

    def _add_log_probs(self, choice: dict[str, Any]) -> None:
        """Add the log probabilities of the tokens of a piece; the last piece has the rest."""
        part = choice if "text" in choice else choice.get("message") or choice.get("delta") or {}
        self._shown += len(part.get("text", part.get("content")) or "")
        unsent, most = self._request.places[self._num_places :], self._shown
        if choice.get("finish_reason") is not None or part.get("tool_calls"):
            # Reasoning and what is around it are no part of what was shown.
            most = unsent[-1][1] - self._end.num_cut if unsent and self._end.num_cut else 1 << 62
        offsets = [begin for begin, *_ in unsent if begin < most]
        found = [place for *_, place in unsent[: len(offsets)]]
        self._num_places += len(found)
        if found and "text" not in choice:
            choice["logprobs"] = {"content": found}
        elif found:
            choice["logprobs"] = {
                "tokens": [place["token"] for place in found],
                "token_logprobs": [place["logprob"] for place in found],
                "top_logprobs": [
                    {each["token"]: each["logprob"] for each in reversed(place["top_logprobs"])}
                    for place in found
                ],
                "text_offset": offsets,
            }


class TextEnd:
    """Cuts a text, piece by piece, before the first of some strings."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings, self._held = strings, ""
        self.num_cut = 0  # characters behind such a string's beginning

    def cut(self, choice: dict[str, Any]) -> None:
        """Cut a choice of an answer, or of an event of a stream."""
        part = choice.get("delta") or choice.get("message")
        is_last = choice.get("finish_reason") is not None
        name = "text" if "text" in choice else "content"
        part = choice if name == "text" else (part if part is not None else {})
        text = part.get(name)
        if text is not None or is_last:
            kept = self.feed(text or "", is_last)
            if kept or text is not None:
                part[name] = kept
                if name == "content" and "message" not in choice:
                    choice["delta"] = part
        if is_last and self.num_cut and choice["finish_reason"] == "length":
            choice["finish_reason"] = "stop"

    def feed(self, text: str, is_last: bool) -> str:
        """Return what can be shown of the text now; what may begin a string waits."""
        if self.num_cut:
            self.num_cut += len(text)
            return ""
        held = self._held + text
        found = [place for each in self._strings if (place := held.find(each)) >= 0]
        if found:
            self.num_cut = len(held) - min(found)
            return held[: min(found)]
        sizes = (
            size
            for each in self._strings
            for size in range(1, min(len(each), len(held) + 1))
            if held.endswith(each[:size])
        )
        waiting = 0 if is_last else max(sizes, default=0)
        self._held = held[len(held) - waiting :]
        return held[: len(held) - waiting]


class Pieces:
    """Divides a text into what each of its tokens adds to it, as a stream does.

    The last token of a character adds all of it. A text is compared with the one before, since a
    token by itself may lack its space (as in vLLM and text-generation-inference).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._special = tokenizer, set(tokenizer.all_special_ids)
        self._text = partial(tokenizer.decode, skip_special_tokens=True)
        self._before, self._waiting = list[int](), list[int]()  # the latest tokens
        self._head, self._size = "", 0  # the text of those before, characters of all pieces

    def after(self, *tokens: int) -> str:
        """Return what follows the last whole character with these tokens."""
        return self._text([*self._before, *self._waiting, *tokens])[len(self._head) :]

    def add(self, token: int) -> str:
        """Return what the next token adds."""
        piece = self.after(token)
        self._waiting.append(token)
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._before, self._waiting = self._waiting, []
        self._head = self._text(self._before)
        return piece

    def places(self, output: Any, first: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield tokens with their log probabilities, as OpenAI's API has them.

        They are those from the place `first` on, with where their pieces begin and end.
        """
        for at, token in enumerate(output.generated_tokens[first:], first):
            top = output.top_logprobs[at] if output.top_logprobs else {}
            shown = {
                each: self._shown(each, log_prob)
                for each, log_prob in {**top, token: output.logprobs[at]}.items()
            }
            piece = self.add(token)
            if output.is_finished() and at == len(output.generated_tokens) - 1:
                piece += self.after()
            if token not in self._special:
                shown[token] |= {"token": piece, "bytes": list(piece.encode())}
            self._size += len(piece)
            tops = {"top_logprobs": [shown[each] for each in top]}
            yield self._size - len(piece), self._size, shown[token] | tops

    def _shown(self, token: int, log_prob: float) -> dict[str, Any]:
        known: list[int] | None = []
        if token in self._special:  # which is no text
            text = self._tokenizer.decode([token])
        else:
            text = self.after(token)
            known = None if "\ufffd" in text else list(text.encode())
        # OpenAI's least number, as JSON has no infinity
        return {"token": text, "logprob": max(log_prob, -9999.0), "bytes": known}


def unfinished_end(tokens: Sequence[int], tokenizer: Any) -> str:
    """Return the end of a text that its stream holds back, since it is no whole character."""
    pieces = Pieces(tokenizer)
    is_whole = not tokenizer.decode(tokens, skip_special_tokens=True).endswith("\ufffd")
    for token in () if is_whole else tokens:
        pieces.add(token)
    return pieces.after()


def add_fields(whole: dict[str, Any], request: ServedRequest) -> bool:
    """Add our fields to an answer that reports the usage; return whether it does."""
    # The events of the Responses API hold the answer one level deeper.
    values = whole.get("response", whole)
    usage = values.get("usage") if isinstance(values, dict) else None
    if not isinstance(usage, dict):
        return False
    found = request.stats
    if found is not None:
        counts = found.to_dict("vllm")
        if found.fallback_reason is not None:
            counts["fallback_reason"] = str(found.fallback_reason)
        values["metrics"] = {"speculative_decoding": counts}
    if request.prediction is not None and "completion_tokens" in usage:
        details = usage.setdefault("completion_tokens_details", {})
        source = (found or SpeculativeStats()).per_source.get("prediction", SourceStats(0, 0, 0))
        details["accepted_prediction_tokens"] = source.accepted
        details["rejected_prediction_tokens"] = source.drafted - source.accepted
    return True
