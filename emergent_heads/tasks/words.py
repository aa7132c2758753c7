"""Words, names and sentences that the language tasks draw from."""

WORDS = tuple(
    """
    air animal apple arm army art baby back bag ball band bank bar base beach bed bell bird board boat body bone book
    bottle box boy brain bread bridge brother building bus business butter camera camp car card care case cat cause
    cell center chair chance change child church circle city class clothes cloud club coast coat coffee college color
    corn cost country couple course court cover cow cross cup dance date daughter day death desk dinner doctor dog door
    dream dress drink driver earth east edge egg end engine evening event eye face fact family farm father fear field
    film fire fish floor flower food foot force forest friend fruit game garden gas gate girl glass goal gold grass
    ground group growth gun hair hall hand hat head health heart heat hill history hole home horse hospital hotel hour
    house ice idea island job key kind king kitchen knife lady lake land language law leader leg letter level library
    life light line lip list love lunch machine man map mark market match meat metal milk mind minute money month moon
    morning mother mountain mouth movie music name neck news night north note number object ocean office oil page paint
    pair paper park part party path people phone picture piece pig place plane plant plate player pocket point police
    pool post power price queen question rain record rest rice ring river road rock roof room rule salt sand school
    science sea season seat sheep ship shirt shoe shop shoulder side sign silver sister size skin sky sleep smile snow
    son song sound south space spring square stage star state station step stone store storm story street student sugar
    summer sun table tail talk tax teacher team test thing time tooth town train tree trip truck uncle valley voice
    wall war watch water wave week west wheel wife wind window wing winter wood word work world year
    """.split()  # noqa: SIM905 (a page of quotation marks would be harder to read)
)

NAMES = tuple(
    """
    Mary John Tom James Robert Michael David Daniel Mark Paul George Kevin Brian Jason Jeff Frank Scott Eric Stephen
    Andrew Peter Henry Adam Jack Luke Ryan Sam Simon Steve Tim Alex Ben Chris Dan Jim Joe Ken Matt Mike Nick Patrick
    Richard Roger Thomas William Alice Amy Anna Anne Barbara Carol Claire Diana Elizabeth Emily Emma Helen Jane
    Jennifer Jessica Julia Karen Kate Kelly Laura Linda Lisa Lucy Maria Martha Michelle Nancy Rachel Rose Ruth Sarah
    Susan
    """.split()  # noqa: SIM905 (a page of quotation marks would be harder to read)
)
PLACES = ("store", "park", "school", "office", "market", "station", "garden", "library", "beach", "hospital")
THINGS = ("drink", "book", "ring", "flower", "letter", "ball", "key", "coat", "basket", "computer")
TEMPLATES = (
    "When {first} and {second} went to the {place}, {subject} gave a {thing} to",
    "Then, {first} and {second} went to the {place}. {subject} handed a {thing} to",
    "After {first} and {second} had a long day at the {place}, {subject} offered a {thing} to",
    "While {first} and {second} were working at the {place}, {subject} passed a {thing} to",
    "Yesterday {first} and {second} met at the {place}, and {subject} brought a {thing} to",
    "Friends since childhood, {first} and {second} walked to the {place}. There {subject} showed a {thing} to",
    "Because {first} and {second} had found a {thing} at the {place}, {subject} decided to give it to",
    "Later {first} and {second} left the {place} together, and {subject} sold a {thing} to",
)
