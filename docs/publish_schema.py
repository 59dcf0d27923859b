"""Write the JSON Schema of the dispatch table to docs/dispatch-table.schema.json."""

from __future__ import annotations

import json
from pathlib import Path

from loka_toolkit.artifacts.dispatch_table import json_schema

TARGET = Path(__file__).parent / "dispatch-table.schema.json"

if __name__ == "__main__":
    TARGET.write_text(json.dumps(json_schema(), indent=2, sort_keys=True) + "\n")
    print(TARGET)
