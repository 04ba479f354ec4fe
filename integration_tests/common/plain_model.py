"""Greedy answers of the model itself, in float32 and without a server: a second reference."""

import torch

from integration_tests.common.server import Answer


class PlainModel:
    """Answers like `Reference`, from a checkpoint's folder. Servers must run in float32.

    Attention reads keys and values as `kv_dtype`, the server's KV cache, holds them.
    """

    def __init__(self, folder, kv_dtype=None):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)  # servers need the other cores
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        chosen = {} if kv_dtype is None else {"attn_implementation": _stored_in(kv_dtype)}
        self._model = AutoModelForCausalLM.from_pretrained(folder, **chosen).float().eval()
        self._known = {}

    def answers(self, asks):
        return [self._choices(ask.body()) for ask in asks]

    def ids(self, text):
        return self._tokenizer(text)["input_ids"]

    def _choices(self, body):
        greedy = body["temperature"] == 0 or body["extra_body"].get("top_k") == 1
        assert greedy, "only greedy answers have a reference"
        if "messages" in body:
            messages = body["messages"]
            ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            prompts = [tuple(ids if isinstance(ids, list) else ids["input_ids"])]
        else:
            texts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
            prompts = [tuple(self.ids(text)) for text in texts]
        given = body["max_tokens"], "messages" in body
        return [self._answer(prompt, *given) for prompt in prompts for _ in range(body["n"])]

    def _answer(self, *given):
        if given not in self._known:
            self._known[given] = self._decode(*given)
        return self._known[given]

    def _decode(self, prompt, tokens, may_end):
        ids, logprobs = self.greedy(prompt, tokens)
        end = self._tokenizer.eos_token_id
        ends = may_end and end in ids
        if ends:
            ids = ids[: ids.index(end)]
        texts = [self._tokenizer.decode([token]) for token in ids]
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        likeliest = [{t: p} for t, p in zip(texts, logprobs, strict=False)]
        return Answer(text, "stop" if ends else "length", texts, logprobs[: len(ids)], likeliest)

    @torch.inference_mode()
    def greedy(self, prompt, tokens):
        """Ids and log-probabilities of so many tokens after the ids of a prompt."""
        ids, logprobs, rows, cache = [], [], torch.tensor([list(prompt)]), None
        for _ in range(tokens):
            out = self._model(rows, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logprob, token = out.logits[0, -1].log_softmax(-1).max(-1)
            ids.append(int(token))
            logprobs.append(float(logprob))
            rows = token.reshape(1, 1)
        return ids, logprobs


def _stored_in(kv_dtype):
    """The name of an attention over keys and values of this dtype, which transformers knows now."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    most = torch.finfo(kv_dtype).max

    def stored(new):
        return new.clamp(-most, most).to(kv_dtype).to(new.dtype)

    def attention(module, q, k, v, mask, scaling, **_):
        """Causal attention of the last tokens, [B, H, T, D] each; returns [B, T, H, D]."""
        group = q.shape[1] // k.shape[1]
        keys, values = (stored(x).repeat_interleave(group, 1) for x in (k, v))
        scores = (q @ keys.transpose(-1, -2)) * scaling
        queries, tokens = scores.shape[-2:]
        seen = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return (weights @ values).transpose(1, 2).contiguous(), None

    name = f"kv-in-{str(kv_dtype).removeprefix('torch.')}"
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    return name
