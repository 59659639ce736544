"""An HTTP API in OpenAI's form and a playground, for models that load() opens."""
