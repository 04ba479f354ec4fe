"""One harness for `deft ab` and the benchmarks: servers, requests, answers, comparison."""
