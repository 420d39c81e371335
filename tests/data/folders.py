"""Functions that write prepared tfds folders without TensorFlow."""

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image


def png(pixels, **options):
    """Returns an image as the content of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(
        file, "PNG", **options
    )
    return file.getvalue()


def write(root, name, splits, *, version="1.0.0", declared=None, names=None):
    """Writes a dataset and returns its folder, root/name/version.

    Args:
      root: Folder of all datasets.
      name: Name of the dataset.
      splits: Values of each feature of each split, {split: {feature: values}}.
      version: Version of the dataset.
      declared: Number of records to declare in dataset_info.json, {split: number}, if wrong.
      names: Class names of features, {feature: names}.
    """
    import tensorflow_datasets as tfds
    from array_record.python.array_record_module import ArrayRecordWriter
    from tensorflow_datasets.proto import tf_example_pb2

    folder = Path(root) / name / version
    folder.mkdir(parents=True)
    base = name.split("/")[0]
    features = {}
    for key, values in next(iter(splits.values())).items():
        if key == "image":
            features[key] = tfds.features.Image(shape=np.shape(values[0]), dtype=np.uint8)
        elif isinstance(values[0], str):
            features[key] = tfds.features.Text()
        elif names and key in names:
            features[key] = tfds.features.ClassLabel(names=names[key])
        else:
            features[key] = tfds.features.Scalar(np.int64)
    written = tfds.features.FeaturesDict(features)
    written.save_config(folder)
    written.save_metadata(folder)
    infos = []
    for split, columns in splits.items():
        records = len(next(iter(columns.values())))
        path = folder / f"{base}-{split}.array_record-00000-of-00001"
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for i in range(records):
            example = tf_example_pb2.Example()
            for key, values in columns.items():
                feature = example.features.feature[key]
                if key == "image":
                    feature.bytes_list.value.append(png(values[i]))
                elif isinstance(values[i], str):
                    feature.bytes_list.value.append(values[i].encode())
                else:
                    feature.int64_list.value.append(int(values[i]))
            writer.write(example.SerializeToString())
        writer.close()
        infos.append(
            {
                "name": split,
                "numBytes": str(path.stat().st_size),
                "shardLengths": [str((declared or {}).get(split, records))],
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
            }
        )
    info = {"name": base, "version": version, "fileFormat": "array_record", "splits": infos}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder
