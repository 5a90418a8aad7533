"""What a text can hold besides its tokens: the kinds of media, with the names that follow from each.

A new kind is an entry of KINDS, a Layouts (media/rows.py), and an encoder (models/modality.py) in a section of
MultimodalConfig; models, samples and tasks go through KINDS.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Kind:
    name: str
    """`image`: model.image_token is its token in the text, image_index the array that says what tokens read."""
    noun: str
    """For messages."""
    section: str
    """Of a model (model.vision), and attribute of its module; the layers of its encoder are `vision_layers`."""
    values: str
    """The array of a batch with what the encoder reads, for each position of a block."""
    values_dtype: str
    places: str
    """The array that says where in its medium each position is, int32."""
    num_places: int
    blank: str
    """What a medium without content is called, and its value in `values`."""
    blank_value: float

    @property
    def plural(self) -> str:
        return f"{self.noun}s"

    @property
    def token(self) -> str:
        return f"{self.name}_token"

    @property
    def index(self) -> str:
        return f"{self.name}_index"

    @property
    def features(self) -> str:
        """In a batch of an engine, what the encoder has made of them."""
        return f"{self.name}_features"

    @property
    def stack(self) -> str:
        return f"{self.section}_layers"


IMAGE = Kind("image", "image", "vision", "patches", "uint8", "patch_places", 5, "grey", 128)
AUDIO = Kind("audio", "clip", "audio", "frames", "float32", "frame_places", 3, "silent", -1.5)
KINDS = (IMAGE, AUDIO)
