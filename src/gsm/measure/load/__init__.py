"""A load tester for OpenAI-compatible servers, independent of our engine. docs/load.md explains every figure.

    prompts (workload) -> when to send (runner) -> HTTP (client) -> events (sse, protocol) -> arrivals (record)
        -> latencies of one request (samples) -> percentiles (metrics) -> result (report)

`session` puts these together for one server, `ab` for two arms in interleaved rounds.
"""
