// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"net/netip"
	"strings"
	"unicode"
	"unicode/utf8"
)

// The text of an error is read once, from left to right. At the start of each token three
// tables decide, in this order:
//
//   - hints: what the previous word says about the token. After "status", 503 is a code and
//     stays. After "column", a name stays.
//   - tokenClasses: the shape of the token, such as a UUID or a time.
//   - followers: whether a word of letters can be an ordinary word.
//
// The tables are fixed, unlike those of miners of log templates such as Drain, which learn.
// A cause must be the same in each process, and for each record that is read back, whatever
// errors came before.
//
// A change to anything in this file changes causes, and needs a new causeVersion.

// tokenClass is one kind of token that varies from message to message.
type tokenClass struct {
	placeholder string

	// first is the set of kinds of character with which the token may start.
	first kind

	// match returns the end of the token that starts at s[i], or 0. The character before
	// s[i] is neither a letter nor a digit, unless the token starts with a mark.
	match func(s string, i int) int
}

// kind is a set of kinds of character.
type kind uint8

const (
	digit kind = 1 << iota
	hexLetter
	capital
	letter
	joiner // joins the parts of ids and base64: - _ + /
	mark   // ? ) [ :
)

var kinds = func() (m [256]kind) {
	for c := range m {
		switch c := byte(c); {
		case isDigit(c):
			m[c] = digit
		case isLower(c | 0x20):
			m[c] = letter
			if isHex(c) {
				m[c] |= hexLetter
			}
			if isUpper(c) {
				m[c] |= capital
			}
		case strings.IndexByte("-_+/", c) >= 0:
			m[c] = joiner
		case strings.IndexByte("?)[:", c) >= 0:
			m[c] = mark
		}
	}
	return m
}()

// tokenClasses are tried in order. Numbers and ids have the same placeholder, because some
// ids happen to contain no letter.
var tokenClasses = [...]tokenClass{
	{"?<s>", mark, matchQuery},
	{")=(<s>", mark, matchKeyDetail},
	{"<s>", digit | letter, matchUserinfo},
	{"<email>", digit | letter, matchEmail},
	{"<uuid>", digit | hexLetter, matchUUID},
	{"<n>", digit | letter | joiner, matchBase64},
	{"<n>", digit | letter | joiner, matchNanoid},
	{"<n>", digit | letter, matchPodSuffix},
	{"<n>", digit | hexLetter, matchHexPairs},
	{"<time>", digit | capital, matchTime},
	{"<ip>", digit | hexLetter | mark, matchIP},
	{"<dur>", digit, matchDuration},
	{"<size>", digit, matchSize},
}

// hint is what a word says about the token that follows it.
type hint uint8

const (
	hintNone   hint = iota
	hintID          // an id: order 4711
	hintName        // a name; one or two digits in it stay: column "address2"
	hintSchema      // a name that stays as it is: constraint "fk_rails_1a2b3c4d5e"
	hintHost        // a host, whose port stays: dial tcp redis:6379
	hintCode3       // a code of up to three characters: status 503
	hintCode5       // a code of up to five characters: SQLSTATE 22P02
	hintError       // as hintCode5, but as hintStatus after a colon: "error 1062" stays, not "error: 1062"
	hintStatus      // an HTTP error status, unless the number counts something: returned 503
	hintGot         // as hintStatus, but only in "got 503 from", or if the text mentions a status
	hintValue       // a quoted user value, up to the next colon: parsing "x"
	hintInput       // a quoted user value, up to the second colon: invalid input syntax for type uuid: "x"
)

var hints = func() map[string]hint {
	m := map[string]hint{}
	for c, words := range map[hint]string{
		hintID: "id uid uuid guid order ord user usr customer cus account acct tenant request req session sess sid " +
			"token tok key job task run trace span payment pay pi invoice inv charge ch sub subscription txn tx " +
			"transaction transfer event evt message msg pod container instance object document doc record item " +
			"product sku shipment parcel batch upload file cart device client consumer member correlation org res lock " +
			"build deploy deployment workflow execution operation",
		hintName:   "column field property attribute parameter argument index relation table",
		hintSchema: "constraint",
		hintHost:   "tcp tcp4 tcp6 udp host hostname broker server addr address endpoint upstream to at lookup",
		hintCode3:  "status http https exit exception signal",
		hintCode5:  "code sqlstate errno errcode reason ora tns e aadsts",
		hintError:  "error err",
		hintStatus: "returned returns responded response answered with",
		hintGot:    "got received",
		hintValue:  "parsing parse malformed entry value character duration time port unmarshal",
		hintInput:  "input",
	} {
		for w := range strings.FieldsSeq(words) {
			m[w] = c
		}
	}
	return m
}()

// reasons are the texts of HTTP statuses. The number before such a text is a status.
var reasons = [...]string{
	"page not found", "Bad Request", "Unauthorized", "Payment Required", "Forbidden", "Not Found", "Method Not Allowed",
	"Request Timeout", "Conflict", "Gone", "Precondition Failed", "Request Entity Too Large", "Content Too Large",
	"Unprocessable", "Locked", "Too Many Requests", "Internal Server Error", "Not Implemented", "Bad Gateway",
	"Service Unavailable", "Service Temporarily Unavailable", "Gateway Timeout", "Gateway Time-out",
}

// numbered are names that contain digits.
var numbered = set("int8 int16 int32 int64 int128 float32 float64 complex64 complex128 sha1 sha256 sha384 sha512 " +
	"md5 utf8 utf16 utf32 utf8mb3 utf8mb4 latin1 base32 base58 base64 http1 http2 http3 h2 oauth1 oauth2 ipv4 ipv6 " +
	"x509 x86 amd64 arm64 win32 s3 ec2 4xx 5xx k8s e2e b2b h2c route53 p256 p384 p521 " +
	"rs256 es256 hs256 ps256 ed25519 curve25519 aes128 aes256 crc32 crc64 " +
	"tls1 tls10 tls11 tls12 tls13 pkcs1 pkcs7 pkcs8 pkcs12 sqlite3 neo4j log4j i18n l10n db2")

// servicePorts are the ports of well-known services. Any other port may be the client's
// own.
var servicePorts = set("22 25 53 80 110 143 389 443 465 587 636 993 995 1433 1521 1883 2181 2379 3000 3306 4222 " +
	"5000 5432 5671 5672 6379 6432 6650 8000 8080 8081 8443 8883 9000 9042 9090 9092 9093 9094 9200 9300 " +
	"11211 15672 26257 26379 27017")

// sourceFiles are the file extensions of source files, whose names look like names of
// hosts.
var sourceFiles = set("go java kt scala cs py js ts rb php rs c cc cpp sql json yaml yml xml html proto")

func set(words string) map[string]bool {
	m := map[string]bool{}
	for w := range strings.FieldsSeq(words) {
		m[w] = true
	}
	return m
}

// followers has the letters that may follow each letter in the words of error texts. They
// were counted in the error texts of Go's standard library and of the modules that it is
// mostly used with. Of 100 ordinary words, one has two pairs that are not in the table; of
// 100 strings of ten random letters, 92 have.
var followers = func() (m [26]uint32) {
	for i, letters := range [26]string{
		"bcdefgijklmnpqrstuvwxy", "abdehijlorsuy", "acdeghiklmoprstuy", "abcdeghilnoprstuy", "abcdefghiklmnopqrstuvwxyz",
		"acefiklorstuy", "aceghilmnorstuxy", "aeimortuy", "abcdefglmnoprstvxz", "eosw", "acdeinorsuw", "abdefghiklorstuvy",
		"abdeilmnopqsuy", "abcdefghiklmnoprstuvxy", "abcdefgiklmnoprstuvwxyz", "acdeghiklmoprstuy", "lu", "abcdefgiklmnoprstuvy",
		"acdefghiklmnopqrstuwy", "abcdefghilmnoprstuwy", "abcdefgilmnoprstu", "acei", "aehilnorst", "acdehimpty", "bceilmnpst", "aeio",
	} {
		for _, c := range letters {
			m[i] |= 1 << (c - 'a')
		}
	}
	return m
}()

// strange counts the pairs of letters in w that ordinary words do not have, and consonants
// from the fifth in a row. A capital after a small letter begins a new word.
func strange(w string) (pairs int) {
	consonants := 0
	for i := range len(w) {
		if strings.IndexByte("aeiouyAEIOUY", w[i]) >= 0 || !isLower(w[i]|0x20) {
			consonants = 0
		} else if consonants++; consonants >= 5 {
			pairs++
		}
		if i == 0 || isLower(w[i-1]) && isUpper(w[i]) || kinds[w[i-1]]&kinds[w[i]]&letter == 0 {
			continue
		}
		if followers[w[i-1]|0x20-'a']&(1<<(w[i]|0x20-'a')) == 0 {
			pairs++
		}
	}
	return pairs
}

// normalise replaces the parts that vary between two failures of one kind.
func normalise(s string) string {
	var n normaliser
	for i := 0; i < len(s) && n.b.Len() < causeText+64; {
		i = n.token(s, i)
	}
	return cut(strings.TrimSuffix(n.b.String(), " "), causeText)
}

type normaliser struct {
	b strings.Builder

	// last is the latest placeholder, and gap the separator after it. gap is written later,
	// so that a list of any length becomes one placeholder.
	last, gap string

	// hint is the hint of the latest word, which ended at wordEnd. The hint of a name lasts
	// for all words of the name: named is set after its first word, and a space ends it.
	hint    hint
	wordEnd int
	named   bool

	// status says that the text mentions a status.
	status bool

	// values is the number of colons after which a quoted string is no longer a user value.
	// At 0 a quoted string is no user value now.
	values int

	// unclosed has the kinds of quotes that have no closing one in the rest of the text.
	unclosed [3]bool
}

// token writes the token that starts at s[i] and returns its end.
func (n *normaliser) token(s string, i int) int {
	c := s[i]
	if c >= utf8.RuneSelf {
		r, size := utf8.DecodeRuneInString(s[i:])
		if unicode.IsSpace(r) {
			n.space()
		} else {
			n.text(s[i : i+size])
		}
		return i + size
	}
	if c <= ' ' || c == 0x7f {
		n.space()
		return i + 1
	}
	if k := kinds[c]; k == mark || k != 0 && (i == 0 || !isWord(s[i-1])) {
		if end := n.code(s, i); end > 0 {
			n.text(s[i:end])
			n.wordEnd = end
			return end
		}
		for j := range tokenClasses {
			class := &tokenClasses[j]
			if class.first&k == 0 {
				continue
			}
			if end := class.match(s, i); end > 0 {
				n.placeholder(class.placeholder)
				n.named = true
				return end
			}
		}
	}
	switch {
	case isWord(c):
		return n.word(s, i)
	case n.values > 0 && strings.IndexByte("\"'`", c) >= 0:
		if end := n.quoted(s, i); end > 0 {
			n.placeholder("<s>")
			n.values = 0
			return end
		}
	case c == ':' && n.values > 0 && n.hint != hintValue: // unlike "value: 'x'"
		n.values--
	case c == ';':
		n.values = 0
	case (c == '-' || c == '+') && i+1 < len(s) && isDigit(s[i+1]) && (i == 0 || strings.IndexByte(" \t\n=(,[:\"'", s[i-1]) >= 0):
		if n.code(s, i+1) == 0 {
			return i + 1 // the sign of a number
		}
	}
	n.text(s[i : i+1])
	return i + 1
}

func (n *normaliser) text(s string) {
	if n.last != "" && n.gap == "" && s == "," {
		n.gap = s
		return
	}
	n.flush()
	n.b.WriteString(s)
}

func (n *normaliser) space() {
	if n.named { // the name that a hint announced ends here
		n.hint, n.named = hintNone, false
	}
	switch {
	case n.last != "":
		if !strings.HasSuffix(n.gap, " ") {
			n.gap += " "
		}
	case n.b.Len() > 0 && !strings.HasSuffix(n.b.String(), " "):
		n.b.WriteByte(' ')
	}
}

func (n *normaliser) flush() {
	n.b.WriteString(n.gap)
	n.last, n.gap = "", ""
}

func (n *normaliser) placeholder(p string) {
	if n.last == p && n.gap != "" {
		n.gap = ""
		return
	}
	n.flush()
	n.b.WriteString(p)
	n.last = p
}

// quoted returns the index after the quoted string that starts at s[i], or 0. An apostrophe
// within a word is no quote.
func (n *normaliser) quoted(s string, i int) int {
	q := s[i]
	unclosed := &n.unclosed[strings.IndexByte("\"'`", q)]
	if *unclosed || q == '\'' && i > 0 && isWord(s[i-1]) {
		return 0
	}
	for j := i + 1; j < len(s); j++ {
		switch {
		case s[j] == '\\' && q != '`':
			j++
		case s[j] == q && (q != '\'' || j+1 == len(s) || !isWord(s[j+1])):
			return j + 1
		}
	}
	*unclosed = true
	if q != '\'' && strings.HasSuffix(s, ellipsis) {
		return len(s) // the end was cut off with the text
	}
	return 0
}

// code returns the end of the code at s[i], or 0 if there is none. A code stays in the
// text.
func (n *normaliser) code(s string, i int) int {
	end := wordEnd(s, i)
	if end-i > 6 || firstDigit(s[i:end]) < 0 {
		return 0
	}
	w, gap := s[i:end], s[min(n.wordEnd, i):i]
	near := len(gap) <= 4 && strings.Trim(gap, " =:-/.([{#\"'") == "" && gap != "://"
	status := len(w) == 3 && w >= "400" && w < "528" && allDigits(w)
	next := nextWord(s, end)
	counts := next != "" && isLower(next[0]) && !prepositions[next]
	switch {
	case status && isReason(s[end:]):
		return end
	case !near:
		return 0
	case n.hint == hintCode3 && len(w) <= 3,
		n.hint == hintCode5 && len(w) <= 5,
		n.hint == hintError && len(w) <= 5 && strings.IndexByte(gap, ':') < 0,
		(n.hint == hintError || n.hint == hintStatus) && status && !counts,
		n.hint == hintGot && status && !counts && s[i-1] != '-' && (n.status || prepositions[next]):
		return end
	}
	return 0
}

func isReason(s string) bool {
	for _, r := range &reasons {
		if strings.HasPrefix(s, " ") && strings.HasPrefix(s[1:], r) {
			return true
		}
	}
	return false
}

// prepositions follow a status, but not a number that counts things.
var prepositions = set("from for on in at when while after by and but")

// nextWord returns the word that comes after a space at s[i], or "".
func nextWord(s string, i int) string {
	if i+1 >= len(s) || s[i] != ' ' {
		return ""
	}
	return s[i+1 : wordEnd(s, i+1)]
}

// word writes the word at s[i] and returns its end.
func (n *normaliser) word(s string, i int) int {
	h := n.hint
	if i-n.wordEnd > 4 {
		h = hintNone
	}
	end := wordEnd(s, i)
	if number := numberEnd(s, i); number > 0 {
		end = number
		switch {
		case servicePorts[s[i:end]] && isHost(s, i, h),
			(h == hintName || h == hintSchema) && n.named && s[i-1] == '_' && end-i <= 2:
			n.text(s[i:end])
		default:
			n.placeholder("<n>")
		}
		n.named = true
		return end
	}

	w := s[i:end]
	from := firstDigit(w)
	if from < 0 {
		if isID(w, h) {
			n.placeholder("<n>")
			n.hint = hintNone
		} else {
			n.text(w)
			n.mean(w, end)
		}
		return end
	}
	after := digitsEnd(w, from)
	switch before := w[:from]; {
	case h == hintSchema, hasNumberedName(w, from, after):
		n.text(w)
	case after == len(w) && isCodeWord(before) && (len(before) > 1 || len(w) <= 6 && isUpper(w[0])): // E11000, HTTP404
		n.text(w)
	case isCamel(w) && strange(w) == 0: // OrderV2Created
		n.text(before)
		n.placeholder("<n>")
		n.text(w[after:])
	case h == hintID, len(w) >= 6 && allHex(w), w[0] == '0' && len(w) > 2 && w[1]|0x20 == 'x' && allHex(w[2:]):
		n.placeholder("<n>")
	case after == len(w) && h == hintName && len(w)-from <= 2: // address2
		n.text(w)
	case after == len(w) && (len(before) < 4 || strange(before) == 0): // worker17
		n.text(before)
		n.placeholder("<n>")
	case len(w) <= 3: // 3rd, r5b
		n.placeholder("<n>")
		n.text(w[after:])
	default:
		n.placeholder("<n>")
	}
	n.wordEnd, n.named = end, true
	if h < hintName || h > hintHost {
		n.hint = hintNone
	}
	return end
}

// mean stores the hint of a word for the next token.
func (n *normaliser) mean(w string, end int) {
	c := hintOf(w)
	if announced := hintName <= n.hint && n.hint <= hintHost; announced && (n.named || c <= hintID) {
		c, n.named = n.hint, true // a part of the name
	}
	switch c { //nolint:exhaustive // the others carry nothing on
	case hintValue:
		n.values = 1
	case hintInput:
		n.values = 2
	case hintName, hintSchema:
		n.values = 0
	case hintCode3:
		n.status = true
	}
	n.hint, n.wordEnd = c, end
}

// hintOf returns the hint of the word. If the word is unknown, it tries the last word
// inside it, as in statusCode and requestID.
func hintOf(w string) hint {
	var buf [16]byte
	for range 2 {
		if len(w) == 0 || len(w) > len(buf) {
			return hintNone
		}
		if c := hints[string(appendLower(buf[:0], w))]; c != hintNone {
			return c
		}
		if one := w[:len(w)-1]; w[len(w)-1] == 's' && hints[string(appendLower(buf[:0], one))] == hintID { // orders/17
			return hintID
		}
		i := len(w) - 1
		for i > 0 && isUpper(w[i-1]) == isUpper(w[len(w)-1]) {
			i--
		}
		if i > 0 && isUpper(w[i-1]) {
			i--
		}
		w = w[i:]
	}
	return hintNone
}

// isCodeWord reports whether a number directly after w is a code.
func isCodeWord(w string) bool {
	h := hintOf(w)
	return hintCode3 <= h && h <= hintError
}

// isID reports whether a word of letters looks random: an id in base 36 may have no digit.
func isID(w string, h hint) bool {
	switch {
	case h == hintName || h == hintSchema:
		return false
	case len(w) >= 8 && allHex(w):
		return true
	case h == hintID:
		return len(w) >= 7 && (strange(w) >= 1 || isMixed(w, len(w)/2))
	}
	return len(w) >= 8 && strange(w) >= 2
}

// hasNumberedName reports whether w contains a numbered name that ends with the digits
// w[from:after]. A short name must be the whole word, or the first word in it.
func hasNumberedName(w string, from, after int) bool {
	var buf [12]byte
	for i := max(0, after-len(buf)); i <= from; i++ {
		lower := appendLower(buf[:0], w[i:after])
		if numbered[string(lower)] && firstDigit(w[after:]) < 0 &&
			(len(lower) >= 4 || i == 0 && (after == len(w) || isUpper(w[after]))) {
			return true
		}
	}
	return len(w) <= len(buf) && numbered[string(appendLower(buf[:0], w))]
}

func appendLower(b []byte, w string) []byte {
	for i := range len(w) {
		b = append(b, w[i]|0x20)
	}
	return b
}

// isCamel accepts names of several capitalised words of three letters or more,
// with one number of one or two digits, which may have a V before it.
func isCamel(w string) bool {
	digits, run := 0, 3
	for i := range len(w) {
		switch c := w[i]; {
		case isDigit(c):
			if digits++; digits > 2 || digits == 2 && !isDigit(w[i-1]) {
				return false
			}
		case isUpper(c):
			if run < 3 && !(c == 'V' || i > 0 && w[i-1] == 'V') {
				return false
			}
			run = 1
			if c == 'V' && i+1 < len(w) && isDigit(w[i+1]) {
				run = 3
			}
		default:
			if i == 0 || isDigit(w[i-1]) {
				return false
			}
			run++
		}
	}
	return digits > 0 && run >= 3 && isUpper(w[0])
}

// isHost reports whether a host's name or address ends at the colon before s[i].
func isHost(s string, i int, h hint) bool {
	if i < 2 || s[i-1] != ':' {
		return false
	}
	if h == hintHost || s[i-2] == ']' {
		return true
	}
	from := i - 1
	for from > 0 && i-from < 64 && (isWord(s[from-1]) || s[from-1] == '.' || s[from-1] == '-') {
		from--
	}
	host := s[from : i-1]
	if sourceFiles[host[strings.LastIndexByte(host, '.')+1:]] {
		return false // a source file and a line number
	}
	return strings.IndexByte(host, '.') > 0 || host == "localhost" || from > 0 && (s[from-1] == '/' || s[from-1] == '@')
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

func isLower(c byte) bool { return 'a' <= c && c <= 'z' }

func isUpper(c byte) bool { return 'A' <= c && c <= 'Z' }

// isWord accepts letters and digits. An underscore joins words, as in ch_3MqL.
func isWord(c byte) bool { return isDigit(c) || isLower(c|0x20) }

func wordEnd(s string, i int) int {
	for i < len(s) && isWord(s[i]) {
		i++
	}
	return i
}

func firstDigit(s string) int {
	for i := range len(s) {
		if isDigit(s[i]) {
			return i
		}
	}
	return -1
}

func digitsEnd(s string, i int) int {
	for i < len(s) && isDigit(s[i]) {
		i++
	}
	return i
}

func allDigits(s string) bool { return s != "" && digitsEnd(s, 0) == len(s) }

func isHex(c byte) bool { return isDigit(c) || 'a' <= c|0x20 && c|0x20 <= 'f' }

func allHex(s string) bool {
	for i := range len(s) {
		if !isHex(s[i]) {
			return false
		}
	}
	return true
}

// endsAt returns i if no word continues there, and 0 otherwise.
func endsAt(s string, i int) int {
	if i < len(s) && isWord(s[i]) {
		return 0
	}
	return i
}

// decimalEnd returns the end of digits with an optional fraction.
func decimalEnd(s string, i int) int {
	i = digitsEnd(s, i)
	if i+1 < len(s) && s[i] == '.' && isDigit(s[i+1]) {
		i = digitsEnd(s, i+1)
	}
	return i
}

// numberEnd returns the end of a number with a fraction and an exponent, or of a version.
func numberEnd(s string, i int) int {
	if !isDigit(s[i]) {
		return 0
	}
	end := decimalEnd(s, i)
	for end+1 < len(s) && s[end] == '.' && isDigit(s[end+1]) {
		end = digitsEnd(s, end+1)
	}
	if e := strings.TrimLeft(s[end:min(len(s), end+2)], "eE"); end+1 < len(s) && s[end]|0x20 == 'e' && (e != "" && strings.IndexByte("+-0123456789", e[0]) >= 0) {
		if exponent := digitsEnd(s, end+2); isDigit(s[exponent-1]) {
			end = exponent
		}
	}
	return endsAt(s, end)
}

// matchQuery accepts a URL's query: ?key=value.
func matchQuery(s string, i int) int {
	if s[i] != '?' || i == 0 || s[i-1] == ' ' {
		return 0
	}
	key := i + 1
	for key < len(s) && key-i < 32 && (isWord(s[key]) || s[key] == '_' || s[key] == '-' || s[key] == '.') {
		key++
	}
	if key == i+1 || key == len(s) || s[key] != '=' {
		return 0
	}
	if end := strings.IndexAny(s[key:], " \t\n\"'`<>()"); end > 0 {
		return key + end
	}
	return len(s)
}

// matchKeyDetail accepts PostgreSQL's "Key (email)=(x) already exists".
func matchKeyDetail(s string, i int) int {
	if !strings.HasPrefix(s[i:], ")=(") {
		return 0
	}
	if end := strings.IndexByte(s[i+1:], ')'); end > 0 {
		return i + 1 + end
	}
	return len(s)
}

// matchUserinfo accepts the user and password of a URL.
func matchUserinfo(s string, i int) int {
	if i == 0 || s[i-1] != '/' || !strings.HasSuffix(s[:i], "://") {
		return 0
	}
	end := strings.IndexAny(s[i:min(len(s), i+128)], "@/ \t\n\"'`")
	if end <= 0 || s[i+end] != '@' {
		return 0
	}
	return i + end
}

func matchEmail(s string, i int) int {
	if strings.IndexByte(s[i:min(len(s), i+65)], '@') < 0 {
		return 0
	}
	at := i
	for at < len(s) && at-i < 64 && (isWord(s[at]) || strings.IndexByte("._%+-", s[at]) >= 0) {
		at++
	}
	if at == i || at == len(s) || s[at] != '@' {
		return 0
	}
	end, dot := wordEnd(s, at+1), false
	for end > at+1 && end+1 < len(s) && end-at < 128 && (s[end] == '.' || s[end] == '-') && isWord(s[end+1]) {
		dot = dot || s[end] == '.'
		end = wordEnd(s, end+1)
	}
	if !dot {
		return 0
	}
	return end
}

// times are shapes of dates and clock times: d is a digit, _ a digit or a space, M the name
// of a month and W the name of a weekday. A fraction and a zone may follow.
var times = [...]string{
	"dddd-dd-ddTdd:dd", "dddd-dd-dd", "dddd/dd/dd", "dddd.dd.dd", "dd:dd:dd", "ddddddddTdddddd",
	"W, dd M dddd dd:dd:dd", "W M _d dd:dd:dd", "M _d dd:dd:dd", "dd/M/dddd:dd:dd:dd",
}

const (
	months   = "JanFebMarAprMayJunJulAugSepOctNovDec"
	weekdays = "MonTueWedThuFriSatSun"
)

func matchTime(s string, i int) int {
	for _, shape := range &times {
		end := shapeEnd(s, i, shape)
		if end == 0 {
			continue
		}
		for end < len(s) && (isDigit(s[end]) || strings.IndexByte(".:+-", s[end]) >= 0) {
			end++
		}
		for !isDigit(s[end-1]) {
			end--
		}
		for _, zone := range [...]string{"Z", "z", " +dddd", " -dddd", " UTC", " GMT", " dddd", " CET", " CEST", " m=+d", " m=-d"} {
			if zoned := shapeEnd(s, end, zone); zoned > 0 && (zone[0] != ' ' || zone[1] != 'm') {
				if endsAt(s, zoned) > 0 {
					end = zoned
				}
			} else if zoned > 0 {
				end = decimalEnd(s, zoned-1)
			}
		}
		return endsAt(s, end)
	}
	return 0
}

// shapeEnd returns the end of the text with the shape at s[i], or 0.
func shapeEnd(s string, i int, shape string) int {
	for j := range len(shape) {
		if i >= len(s) {
			return 0
		}
		names := ""
		switch c := shape[j]; {
		case c == 'd' && isDigit(s[i]), c == '_' && (isDigit(s[i]) || s[i] == ' '), c == 'T' && s[i] == 't':
		case c == 'M' && len(shape) > 4:
			names = months
		case c == 'W':
			names = weekdays
		case c != s[i]:
			return 0
		}
		if names == "" {
			i++
			continue
		}
		if at := strings.Index(names, s[i:min(len(s), i+3)]); at < 0 || at%3 != 0 || len(s) < i+3 {
			return 0
		}
		i += 3
	}
	return i
}

func matchUUID(s string, i int) int {
	if len(s) < i+36 {
		return 0
	}
	for j := range 36 {
		c := s[i+j]
		if dash := j == 8 || j == 13 || j == 18 || j == 23; dash && c != '-' || !dash && !isHex(c) {
			return 0
		}
	}
	return endsAt(s, i+36)
}

// matchIP accepts an IP address, also in brackets. A port is read as a number.
func matchIP(s string, i int) int {
	from, bracket := i, 0
	if i > 0 && isWord(s[i-1]) {
		return 0
	}
	if s[i] == '[' {
		from, bracket = i+1, 1
	}
	end, colons, dots := from, 0, 0
	for ; end < len(s) && end-from < 48 && (isHex(s[end]) || s[end] == ':' || s[end] == '.'); end++ {
		switch s[end] {
		case ':':
			colons++
		case '.':
			dots++
		}
	}
	v4 := strings.IndexByte(s[from:end], '.') < 4 && dots >= 3 && bracket == 0 && isDigit(s[i])
	switch {
	case v4: // without its port, or the end of a sentence
		end = from
		for range 3 {
			if end = digitsEnd(s, end) + 1; end >= len(s) || s[end-1] != '.' {
				return 0
			}
		}
		end = digitsEnd(s, end)
		if end+1 < len(s) && s[end] == '.' && isDigit(s[end+1]) {
			return 0
		}
	case colons < 2:
		return 0
	}
	if end < len(s) && s[end] == '%' {
		end = wordEnd(s, end+1)
	}
	for bracket == 0 && end > from+2 && (s[end-1] == '.' || s[end-1] == ':' && s[end-2] != ':') {
		end--
	}
	if end > len(s) || bracket > 0 && (end == len(s) || s[end] != ']') || endsAt(s, end) == 0 {
		return 0
	}
	if _, err := netip.ParseAddr(s[from:end]); err != nil {
		return 0
	}
	return end + bracket
}

// matchHexPairs accepts hardware addresses and fingerprints of keys.
func matchHexPairs(s string, i int) int {
	end, pairs := i, 0
	for end+1 < len(s) && isHex(s[end]) && isHex(s[end+1]) {
		end += 2
		pairs++
		if end == len(s) || s[end] != ':' && s[end] != '-' {
			break
		}
		end++
	}
	if pairs < 5 {
		return 0
	}
	if s[end-1] == ':' || s[end-1] == '-' {
		end--
	}
	return endsAt(s, end)
}

// matchPodSuffix accepts the suffix that Kubernetes adds to names after a hyphen: five
// characters, with or without the hash of a ReplicaSet and a hyphen before them.
func matchPodSuffix(s string, i int) int {
	if i == 0 || s[i-1] != '-' {
		return 0
	}
	end := podCharsEnd(s, i)
	if end-i >= 6 && end-i <= 10 && end < len(s) && s[end] == '-' {
		i = end + 1
		end = podCharsEnd(s, i)
	}
	if w := s[i:end]; len(w) != 5 || w == "https" || w == "pgsql" {
		return 0
	}
	return endsAt(s, end)
}

// podCharsEnd returns the end of a run of characters that cannot make a word.
func podCharsEnd(s string, i int) int {
	for i < len(s) && strings.IndexByte("bcdfghjklmnpqrstvwxz2456789", s[i]) >= 0 {
		i++
	}
	return i
}

var (
	durations = set("ns us µs μs ms s m h")
	sizes     = set("B kB KB MB GB TB KiB MiB GiB TiB Ki Mi Gi Ti k K M G T %")
)

func matchDuration(s string, i int) int {
	end := i
	for end < len(s) && isDigit(s[end]) {
		number := decimalEnd(s, end)
		if end = unitEnd(s, number); !durations[s[number:end]] {
			return 0
		}
	}
	return endsAt(s, end)
}

func matchSize(s string, i int) int {
	number := decimalEnd(s, i)
	unit := number
	if unit+1 < len(s) && s[unit] == ' ' {
		unit++
	}
	end := unitEnd(s, unit)
	if number-i > 12 || !sizes[s[unit:end]] || unit > number && s[end-1] != 'B' {
		return 0
	}
	return endsAt(s, end)
}

// unitEnd returns the end of a unit: letters, with a µ, or a percent sign.
func unitEnd(s string, i int) int {
	for i < len(s) && (isLower(s[i]|0x20) || s[i] == '%') {
		i++
	}
	if strings.HasPrefix(s[i:], "µ") || strings.HasPrefix(s[i:], "μ") {
		return unitEnd(s, i+len("µ"))
	}
	return i
}

// matchNanoid accepts 21 characters, or 22 as of a UUID in base64, possibly joined by - and
// _. They must change between capitals, small letters and digits more often than words do.
func matchNanoid(s string, i int) int {
	end := i
	for end < len(s) && end-i <= 22 && (isWord(s[end]) || s[end] == '-' || s[end] == '_') {
		end++
	}
	id := s[i:end]
	if len(id) < 21 || len(id) > 22 || wordLength(id) >= 5 {
		return 0
	}
	if isMixed(id, 7) || isMixed(id, 3) && strange(id) >= 2 {
		return end
	}
	return 0
}

// matchBase64 accepts base64 that is long or padded, and JSON web tokens.
func matchBase64(s string, i int) int {
	joined := "+/"
	token := strings.HasPrefix(s[i:], "eyJ") // {"
	if token {
		joined = "._-"
	}
	end := i
	for end < len(s) && end-i < causeInput && (isWord(s[end]) || strings.IndexByte(joined, s[end]) >= 0) {
		end++
	}
	text := s[i:end]
	if len(text) < 14 {
		return 0
	}
	for end < len(s) && s[end] == '=' && end < i+len(text)+2 {
		end++
	}
	padded := end > i+len(text) && (end-i)%4 == 0 && endsAt(s, end) > 0
	switch {
	case token && len(text) >= 20:
		return end
	case wordLength(strings.TrimLeft(text, joined)) >= 5: // a path, or a name and its value
		return 0
	case padded && end-i >= 16, len(text) >= 40 && isMixed(text, len(text)/4):
		return end
	}
	return 0
}

// wordLength returns the length of the ordinary word at the start of s, or 0. The word is
// in small letters and not the whole of s.
func wordLength(s string) int {
	end := 0
	for end < len(s) && isLower(s[end]) {
		end++
	}
	if end == 0 || endsAt(s, end) == 0 || end == len(s) || strange(s[:end]) > 0 {
		return 0
	}
	return end
}

// isMixed reports whether s has capitals and small letters, and changes between them and
// digits at least often times. With a digit in s, three changes are enough.
func isMixed(s string, often int) bool {
	var digit, upper, lower bool
	changes := 0
	for i := range len(s) {
		c := s[i]
		digit, upper, lower = digit || isDigit(c), upper || isUpper(c), lower || isLower(c)
		if i > 0 && isWord(c) && isWord(s[i-1]) && (isDigit(c) != isDigit(s[i-1]) || isUpper(c) != isUpper(s[i-1])) {
			changes++
		}
	}
	return upper && lower && (changes >= often || digit && changes >= 3)
}
