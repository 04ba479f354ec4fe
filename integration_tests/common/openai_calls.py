"""Requests in every form that the `openai` package has for text, and their answers."""

from dataclasses import dataclass, field

from integration_tests.common.server import Answer


@dataclass(frozen=True)
class Call:
    """One greedy request: a completion or a chat completion, streamed or not, of `n` choices."""

    prefix: str
    """Text that other requests share: the prompt's beginning, or the chat's system message."""
    question: str
    tokens: int
    n: int = 1
    chat: bool = False
    stream: bool = False

    @property
    def prompt(self):
        return f"{self.prefix}\n\n{self.question}"

    @property
    def choices(self):
        return self.n

    def body(self):
        """The request without the model's name.

        vLLM refuses several choices at temperature 0. The likeliest token alone, sampled, is the
        same answer. A completion has the requested length; a chat may end earlier, as usual.
        """
        extra = {"top_k": 1} if self.n > 1 else {}
        body = {
            "max_tokens": self.tokens, "n": self.n, "temperature": 1 if self.n > 1 else 0,
            "stream": self.stream, "extra_body": extra,
        }  # fmt: skip
        if not self.chat:
            extra["ignore_eos"] = True
            return {**body, "prompt": self.prompt, "logprobs": 1}
        messages = [
            {"role": "system", "content": self.prefix},
            {"role": "user", "content": self.question},
        ]
        return {**body, "messages": messages, "logprobs": True, "top_logprobs": 1}


@dataclass
class _Choice:
    """What has come of a choice so far."""

    text: str = ""
    finish: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[dict[str, float]] = field(default_factory=list)

    def add(self, part, chat):
        """Add a choice of a response or of a stream's chunk."""
        self.finish = part.finish_reason or self.finish
        logs = part.logprobs
        if chat:
            message = part.delta if hasattr(part, "delta") else part.message
            self.text += message.content or ""
            for entry in (logs.content or ()) if logs else ():
                self.tokens.append(entry.token)
                self.logprobs.append(entry.logprob)
                self.likeliest.append({each.token: each.logprob for each in entry.top_logprobs})
        else:
            self.text += part.text
            if logs:
                self.tokens += logs.tokens
                self.logprobs += logs.token_logprobs
                self.likeliest += logs.top_logprobs

    def answer(self):
        return Answer(
            self.text, self.finish, tuple(self.tokens), tuple(self.logprobs), tuple(self.likeliest)
        )


async def answer(client, model, call, *, begun=None, leave_after=None):
    """Send a request; returns its choices in order.

    Parameters
    ----------
    client : openai.AsyncOpenAI
    model : str
        The served model's name.
    call : Call
    begun : asyncio.Event, optional
        Set when the first piece of the answer is here.
    leave_after : int, optional
        Close the stream after so many chunks, which aborts the request. Its answer is then what
        has come so far.
    """
    found = [_Choice() for _ in range(call.n)]

    def add(response):
        if begun is not None:
            begun.set()
        for part in response.choices:
            found[part.index].add(part, call.chat)

    create = client.chat.completions.create if call.chat else client.completions.create
    response = await create(model=model, **call.body())
    if call.stream:
        seen = 0
        async for chunk in response:
            add(chunk)
            seen += 1
            if seen == leave_after:
                await response.close()
                break
    else:
        add(response)
    return [choice.answer() for choice in found]
