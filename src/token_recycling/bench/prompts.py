"""Prompts written for the demo; none is in the bundled model's training text."""

DEMO = (
    "Anna reads 15 pages a day. Her book has 180 pages. How many days does she need to finish it?",
    "Tom has 12 marbles. He buys 3 bags with 8 marbles each and gives 5 marbles to his sister. "
    "How many marbles does Tom have now?",
    "A baker sells 24 rolls in the morning and twice as many in the afternoon. "
    "Each roll costs $2. How much money does the baker make?",
    "A train has 6 wagons with 40 seats each. 55 seats are empty. How many people are on it?",
    "Continue the story: Once upon a time there was an old miller who had a grey cat. "
    "Every evening the cat sat by the door and waited.",
    "Go on with this story: The children ran down to the river. The boat was gone.",
    "Tell me the story of The Fox And The Lantern.",
    "Write a Python function: Return the number of items in the queue.",
)
