"""Write trees of thoughts in DeFT's format, for tests of what reads them."""

from __future__ import annotations

import json


def dump_thought_trees(trees, path):
    """Write a file that `load_thought_trees` reads."""
    content = [
        {
            "incompleted": False,
            "prompt": tree.prompt,
            "data": {
                str(node.id): {
                    "id": node.id,
                    "value": node.tokens,
                    "start": node.start,
                    "end": node.end,
                    "children": list(node.children),
                }
                for node in tree.nodes.values()
            },
        }
        for tree in trees
    ]
    path.write_text(json.dumps(content))
