"""Does the ``weave`` package agree? Run by a test in an environment of its own, with nothing of artnb in it.

Reads request bodies on stdin, holds them against the package's types, lets the package write one call to the
server at ``WANDB_BASE_URL`` and read all of it back, and prints what it read as JSON.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    import weave
    from pydantic import TypeAdapter
    from weave.trace.context.weave_client_context import require_weave_client
    from weave.vendor.weave_server_sdk.types import v2_call_complete_params as schema

    batches = TypeAdapter(list[schema.Batch])
    for body in json.load(sys.stdin):
        batches.validate_python(body["batch"], strict=False)
        for call in body["batch"]:
            unknown = set(call) - set(schema.Batch.__annotations__)
            assert not unknown, unknown
    weave.init("team/project")

    @weave.op
    def add(a: int, b: int) -> int:
        return a + b

    assert add(1, 2) == 3
    client = require_weave_client()
    client.flush()
    calls = [
        {
            "op": call.op_name,
            "id": call.id,
            "parent": call.parent_id,
            "output": json.loads(json.dumps(call.output, default=str)),
        }
        for call in client.get_calls()
    ]
    weave.finish()
    described = batches.json_schema()["$defs"]["Batch"]
    fields = {name: name in described["required"] for name in described["properties"]}
    print("READ " + json.dumps({"calls": calls, "fields": fields}))


if __name__ == "__main__":
    main()
