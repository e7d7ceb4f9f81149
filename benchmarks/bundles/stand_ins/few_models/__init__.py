"""The models that are checked, so that SGLang does not import all of its own (``SGLANG_EXTERNAL_MODEL_PACKAGE``)."""
