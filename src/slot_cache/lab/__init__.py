"""Real programs to try things on: a llama-server and a LiteLLM proxy, each in processes of its own.

The demo, the benchmark and the tests marked `real` share what is here. Nothing in this folder is imported by the proxy
callback, and nothing here imports litellm or xllamacpp into the process that uses it: those live in the child processes.
"""
