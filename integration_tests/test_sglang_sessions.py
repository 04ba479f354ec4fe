"""Turns of SGLang's streaming sessions: each one appends to the KV that its session holds."""

from concurrent.futures import ThreadPoolExecutor

from integration_tests.common.answers import PREFIX, TOPICS, check, on
from integration_tests.common.server import Ask, ask_to

TOKENS = 6


@on("default")
def test_turns_of_sessions_behind_one_prefix(server, model):
    check(server, model, [Ask(PREFIX)])
    opened = {"capacity_of_str_len": 10000, "streaming": True}
    contexts = {server.post("open_session", opened): [] for _ in range(4)}
    steps = server.state()["steps_tree"]

    def turn(session, text):
        ids = model.ids(text)
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        asked = {"input_ids": ids, "session_params": {"id": session}, "sampling_params": sampling}
        contexts[session] += ids
        found = server.post("generate", asked)["output_ids"]
        assert found == model.greedy(contexts[session], TOKENS)[0]
        contexts[session] += found

    with ThreadPoolExecutor(len(contexts)) as threads:
        for number in range(3):
            texts = [f"{'' if number else PREFIX}{topic} {number}," for topic in TOPICS]
            list(threads.map(turn, contexts, texts))
    for session in contexts:
        assert ask_to(server, "close_session", {"session_id": session}) == 200
    assert server.state()["steps_tree"] > steps
    assert "cannot be read" not in server.log
