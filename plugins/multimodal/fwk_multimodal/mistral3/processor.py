"""Images of a prompt for Mistral 3: Pixtral's, of which two by two patches make a token."""

from fwk_multimodal._common.pixtral import PixtralProcessor


class Mistral3Processor(PixtralProcessor):
    """Replaces each image's place by a token for each square of patches, and one behind each row of them."""

    merge = 2
