"""Changes what transformers' server answers: our fields, the ends of texts, several choices."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send
from tokenizers.decoders import DecodeStream

from lookahead_hf import stats
from lookahead_hf.stats import SourceStats, SpeculativeStats
from lookahead_hf.tools.serving.fields import ServedRequest, as_error, error

_EVENT = b"data: "
FAILED = "the server failed at this request: its log says why"


def as_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class Reply:
    """Sends an answer with its statistics, holding a stream back until its first token.

    Until then `generate` may refuse its arguments, and the client gets an ordinary error.
    """

    def __init__(self, request: ServedRequest, send: Send, *, holds: bool = True) -> None:
        """`holds`: whether the answer is a text, of which a stream waits for the first token."""
        self._request, self._send, self._holds = request, send, holds
        self.has_started = self.has_ended = False
        self._start: Message = {}
        self._held = b""
        self._end = TextEnd(request.stop)
        self._num_places = self._shown = self._covered = 0

    async def __call__(self, message: Message) -> None:
        if self.has_ended:
            return
        if message["type"] == "http.response.start":
            self._start, self._headers = message, MutableHeaders(scope=message)
            return
        is_last = not message.get("more_body", False)
        self._held += message.get("body", b"")
        request, is_stream = self._request, self._is_stream
        if not is_last and not (is_stream and (request.has_begun or not self._holds)):
            return
        if request.refusal is not None and not self.has_started:
            return
        body, self._held = self._changed(self._held, is_stream), b""
        if request.refusal is not None and request.is_cancelled:
            return  # it is told in the end
        if self._start["status"] >= 400:
            body = as_error(body)
            self._start["status"] = min(self._start["status"], 599)
            if self._start["status"] == 422:
                self._start["status"] = 400
        if not self.has_started:
            self.has_started = True
            if not is_stream:
                self._headers["content-length"] = str(len(body))
            await self._send(self._start)
        self.has_ended = is_last
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def refuse(self, why: str, status: int = 400, code: str | None = None) -> None:
        """End the answer with an error: that of a stream which has begun is its last event."""
        if self.has_ended:
            return
        self.has_ended = True
        body = as_json(error(why, code, status))
        if self.has_started and not self._is_stream:
            return  # the server closes the connection
        if self.has_started:
            body = _EVENT + body + b"\n\n"
        else:
            headers = [(b"content-type", b"application/json")]
            headers.append((b"content-length", str(len(body)).encode()))
            if status in (429, 503):
                headers.append((b"retry-after", b"5"))
            start = {"type": "http.response.start", "status": status, "headers": headers}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    @property
    def _is_stream(self) -> bool:
        return bool(self._start) and self._headers.get("content-type", "").startswith(
            "text/event-stream"
        )

    def _changed(self, body: bytes, is_stream: bool) -> bytes:
        """Return an answer, or events of a stream, with our fields and without what is cut."""
        if not is_stream:
            return self._changed_one(body)
        known = b'"usage"' in body or b'data: {"error"' in body
        if not known and not self._changes_choices:
            return body
        return b"\n\n".join(
            _EVENT + self._changed_one(event[len(_EVENT) :]) if event.startswith(_EVENT) else event
            for event in body.split(b"\n\n")
        )

    def _changed_one(self, answer: bytes) -> bytes:
        if answer.startswith(b'{"error": "'):  # of transformers, which does not escape it
            return as_json(error(self._request.refusal or FAILED, None, 500))
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
        return as_json(whole) if is_changed else answer

    @property
    def _changes_choices(self) -> bool:
        request = self._request
        return bool(request.stop or request.unfinished_end) or request.log_probs is not None

    def _add_log_probs(self, choice: dict[str, Any]) -> None:
        """Add the log probabilities of the tokens of a piece; the last piece has the rest."""
        part = choice if "text" in choice else choice.get("message") or choice.get("delta") or {}
        self._shown += len(part.get("text", part.get("content")) or "")
        takes_rest = choice.get("finish_reason") is not None and not self._end.is_found
        takes_rest |= bool(part.get("tool_calls"))
        found, offsets = [], []
        for place in self._request.places[self._num_places :]:
            if self._covered >= self._shown and not takes_rest:
                break
            found.append(place)
            offsets.append(self._covered)
            self._covered += len(place["token"])
        self._num_places += len(found)
        if found and "text" not in choice:
            choice["logprobs"] = {"content": found}
        elif found:
            choice["logprobs"] = {
                "tokens": [place["token"] for place in found],
                "token_logprobs": [place["logprob"] for place in found],
                "top_logprobs": [
                    {each["token"]: each["logprob"] for each in place["top_logprobs"]}
                    for place in found
                ],
                "text_offset": offsets,
            }


class TextEnd:
    """Cuts a text, piece by piece, before the first of some strings."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings, self._held, self.is_found = strings, "", False

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
        if is_last and self.is_found and choice["finish_reason"] == "length":
            choice["finish_reason"] = "stop"

    def feed(self, text: str, is_last: bool) -> str:
        """Return what can be shown of the text now; what may begin a string waits."""
        if self.is_found:
            return ""
        held = self._held + text
        found = [place for each in self._strings if (place := held.find(each)) >= 0]
        if found:
            self.is_found = True
            return held[: min(found)]
        waiting = 0 if is_last else max(self._beginnings(held), default=0)
        self._held = held[len(held) - waiting :]
        return held[: len(held) - waiting]

    def _beginnings(self, text: str) -> list[int]:
        return [
            size
            for each in self._strings
            for size in range(1, min(len(each), len(text) + 1))
            if text.endswith(each[:size])
        ]


def places(output: Any, first: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the tokens of an output from the place `first` on, with their log probabilities."""

    def shown(token: int, log_prob: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        least = -9999.0  # as of OpenAI; JSON has no infinity
        return {"token": text, "logprob": max(log_prob, least), "bytes": list(text.encode())}

    tokens, tops = output.generated_tokens[first:], output.top_logprobs[first:]
    found = [shown(*each) for each in zip(tokens, output.logprobs[first:], strict=False)]
    for number, place in enumerate(found):
        top = tops[number].items() if tops else ()
        place["top_logprobs"] = [shown(*each) for each in top]
    return found


def unfinished_end(tokens: Sequence[int], tokenizer: Any) -> str:
    """Return the end of a text that its stream holds back, since it is no whole character."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    if not text.endswith("\ufffd"):
        return ""
    stream = DecodeStream([], skip_special_tokens=True)
    pieces = (stream.step(tokenizer.backend_tokenizer, token) for token in tokens)
    return text.removeprefix("".join(filter(None, pieces)))


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


class Choices:
    """Joins the answers to several requests into one of several choices."""

    def __init__(self, requests: Sequence[ServedRequest], num_prompts: int, send: Send) -> None:
        """`num_prompts`: how many prompts the requests have, one after the other."""
        self._requests, self._each, self._send = requests, len(requests) // num_prompts, send
        self._answers: dict[int, dict[str, Any]] = {}  # the last one with usage, of each request
        self._is_stream = False
        self.has_started = False

    def sender(self, index: int) -> Callable[[Message], Any]:
        """Return the `send` of one request's answer."""
        starts: list[Message] = []
        held = bytearray()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                starts.append(message)
                return
            headers = MutableHeaders(raw=list(starts[0]["headers"]))
            held.extend(message["body"])
            self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
            if starts[0]["status"] >= 400:
                await self._fail(index, starts[0]["status"], bytes(held))
            elif self._is_stream:
                await self._pass_on(index, starts[0], bytes(held))
                held.clear()
            elif not message.get("more_body", False):
                self._answers[index] = json.loads(bytes(held))
                await self._end(starts[0])

        return send

    async def _fail(self, index: int, status: int, body: bytes) -> None:
        """Give all requests up, since one of them was refused."""
        said = json.loads(body)["error"]["message"]
        for each in self._requests:
            each.end(said, status)

    async def _pass_on(self, index: int, start: Message, events: bytes) -> None:
        for event in events.split(b"\n\n"):
            if not event.startswith(_EVENT):
                continue
            whole = json.loads(event[len(_EVENT) :])
            for choice in whole.get("choices") or ():
                choice["index"] = index
            if "error" in whole:
                await self._fail(index, 500, event[len(_EVENT) :])
                return
            if whole.get("usage"):
                self._answers[index] = json.loads(event[len(_EVENT) :])
                whole.pop("usage")
                whole.pop("metrics", None)
            await self._send_body(start, _EVENT + as_json(whole) + b"\n\n", True)
        await self._end(start)

    async def _end(self, start: Message) -> None:
        """Send the sums once all answers are there."""
        if len(self._answers) < len(self._requests):
            return
        answers = [self._answers[index] for index in range(len(self._requests))]
        whole = dict(answers[0])
        of_prompts = sum(each["usage"]["prompt_tokens"] for each in answers[:: self._each])
        written = sum(each["usage"]["completion_tokens"] for each in answers)
        whole["usage"] = {
            "prompt_tokens": of_prompts,
            "completion_tokens": written,
            "total_tokens": of_prompts + written,
        }
        found = [each.stats for each in self._requests if each.stats is not None]
        joined = reduce(stats.joined, found) if found else None
        add_fields(whole, ServedRequest(prediction=self._requests[0].prediction, stats=joined))
        choices = [choice for each in answers for choice in each["choices"]]
        whole["choices"] = [] if self._is_stream else choices
        for index, choice in enumerate(whole["choices"]):
            choice["index"] = index
        body = as_json(whole)
        if self._is_stream:
            body = _EVENT + body + b"\n\n"
        await self._send_body(start, body, False)

    async def refuse(self, why: str, status: int) -> None:
        """End the answer with an error."""
        reply = Reply(self._requests[0], self._send)
        if self.has_started:
            body = _EVENT + as_json(error(why, None, status)) + b"\n\n"
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        else:
            await reply.refuse(why, status)

    async def _send_body(self, start: Message, body: bytes, more: bool) -> None:
        if not self.has_started:
            self.has_started = True
            headers = MutableHeaders(raw=list(start["headers"]))
            if not self._is_stream:
                headers["content-length"] = str(len(body))
            await self._send({**start, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
