"""DeFT's recorded trees: their forests against brute force."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.recorded_traces import forest_at
from deft_backend.tools.traces.thought_trees import generate_thought_tree
from forest_oracle import path_of

trees = st.builds(
    generate_thought_tree,
    st.integers(0, 1000),
    depth=st.integers(1, 4),
    width=st.integers(1, 5),
    keep=st.integers(1, 3),
    prompt_tokens=st.integers(1, 50),
    shortest=st.integers(1, 5),
    longest=st.integers(5, 20),
    characters_a_token=st.just(1.0),
)


def brute_force(tree, iteration):
    """Token sets of the decoding thoughts, by a walk up from every node."""
    above = {c: n.id for n in tree.nodes.values() for c in n.children}
    found = []
    for node in tree.nodes.values():
        if not (node.tokens and node.start <= iteration <= node.end):
            continue
        held = {(node.id, t) for t in range(iteration - node.start + 1)}
        at = node.id
        while at in above:
            at = above[at]
            held |= {(at, t) for t in range(tree.nodes[at].tokens)}
        found.append(held)
    return found


@given(trees, st.data())
def test_forest_at_agrees_with_a_count_of_tokens(tree, data):
    iteration = data.draw(st.integers(0, tree.last_iteration))
    forest = forest_at(tree, iteration)
    expected = brute_force(tree, iteration)
    assert sorted(forest.seq_lens.tolist()) == sorted(map(len, expected))
    assert forest.tokens_stored == len(set().union(*expected))
    found = [
        {(node, token) for node in path_of(forest, place) for token in range(forest.length[node])}
        for place in range(forest.batch_size)
    ]
    # Every pair of requests shares as many tokens as the two thoughts.
    overlaps = sorted(len(a & b) for a in found for b in found)
    assert overlaps == sorted(len(a & b) for a in expected for b in expected)
