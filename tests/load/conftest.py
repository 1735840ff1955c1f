import sys
from pathlib import Path

# The scripted server is also what benchmarks/load measures the client with.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "load"))
