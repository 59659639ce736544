"""GGUF files for tests: copies with other values in the header."""

import gguf

REMOVE = "remove this key"


def rewrite(source, target, changes, tensors=None):
    """Copy a file with some keys of its header changed or removed, and some tensors.

    changes: key -> a value, REMOVE, or (value, type of gguf). tensors: name -> array, REMOVE, or
    (bytes, type of gguf).
    """
    reader = gguf.GGUFReader(source)
    fields = {}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            kinds = [*field.types, None]
            fields[name] = field.contents(), kinds[0], kinds[1]
    for name, value in changes.items():
        if value is REMOVE:
            fields.pop(name, None)
            continue
        if not isinstance(value, tuple):
            kind = gguf.GGUFValueType.get_type(value)
            value = value, kind
        sub_kind = None
        if value[1] == gguf.GGUFValueType.ARRAY:
            sub_kind = gguf.GGUFValueType.get_type(value[0][0])
        fields[name] = *value, sub_kind
    writer = gguf.GGUFWriter(target, fields.pop("general.architecture")[0])
    for name, (value, kind, sub_kind) in fields.items():
        writer.add_key_value(name, value, kind, sub_kind)
    changed = dict(tensors or {})
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if tensor.name in changed:
            value = changed.pop(tensor.name)
            if value is REMOVE:
                continue
            data, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    for name, value in changed.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
