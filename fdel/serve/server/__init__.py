"""The server: the OpenAI protocol, text, who may call, HTTP."""
