"""model.size=auto: choose the model from the text and the training time."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="auto_size",
    keys={"model": "thinker.features.auto_size.keys:AutoSizeKeys"},
    complete_config="thinker.features.auto_size.keys:leave_tokenizer_open",
    check_config="thinker.features.auto_size.keys:check_auto_size",
    resolve_config="thinker.features.auto_size.auto_size:resolve_size",
    pages={"sizes.md": "thinker.features.auto_size.sizes_page:sizes_markdown"},
)
