"""Mock data: Megatron's documents without a file."""

import numpy as np

from megajax.data.samples.gpt import GptDataset, GptFormat
from megajax.data.samples.mock import MockIndexedDataset


def test_documents_count_up_modulo_the_vocabulary_and_end_in_eod():
    mock = MockIndexedDataset(vocab_size=100, eod_id=99)
    assert len(mock) == 100_000
    # numpy's default_rng(0).integers(1, 4096, 100000, int32), as Megatron draws them
    assert mock.lengths[:4].tolist() == [3484, 2609, 2094, 1105]
    for document in range(3):
        length = int(mock.lengths[document])
        want = np.concatenate([(np.arange(length - 1) + 1) % 100, [99]])
        assert np.array_equal(mock.read(document), want)
        for offset, count in ((0, 5), (7, 20), (length - 3, 3), (length - 3, None), (length, None)):
            end = length if count is None else offset + count
            assert np.array_equal(mock.read(document, offset, count), want[offset:end])


def test_gpt_dataset_reads_mock_documents():
    mock = MockIndexedDataset(vocab_size=5000, eod_id=4999)
    dataset = GptDataset(mock, (0, 100), None, 512, 1, sample_format=GptFormat(), cache_dir=None)
    for i in range(10):
        sample = dataset[i]
        same = sample["segment_ids"][1:] == sample["segment_ids"][:-1]
        step = np.diff(sample["tokens"])
        assert (step[same & (sample["tokens"][1:] != 4999)] == 1).all()
