// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/dlq"
)

// DLQConfig describes a stream of dead letters. Only Stream must be set.
type DLQConfig struct {
	// Stream is the name of the stream.
	Stream string

	// Subject is the subject of a dead letter; {stream} and {consumer} stand for the stream
	// and consumer of the message. Unset means "dlq.<Stream>.{stream}.{consumer}", with the
	// Stream above, so that two streams of dead letters do not overlap. At least one token
	// must be literal.
	Subject string

	// Dialect is the format of the headers that say why a message is dead; unset means
	// stormguard's own. Spring is refused: its values are binary and do not survive NATS
	// headers.
	Dialect dlq.Dialect

	// NoCreate refuses a stream that does not exist; the error has the command that creates
	// it. Without NoCreate the stream is created, on disk and with unlimited retention.
	NoCreate bool

	// Replicas is the number of replicas of a new stream, 1 to 5; unset means 1.
	Replicas int

	// Duplicates is the duplicate window of a new stream. A dead letter that is written
	// again within it, after a crash between write and ack, makes no twin. At least 2m;
	// unset means 10m. An existing stream also needs at least 2m.
	Duplicates time.Duration
}

const (
	minDuplicates     = 2 * time.Minute
	defaultDuplicates = 10 * time.Minute
)

func (c DLQConfig) withDefaults() DLQConfig {
	if c.Subject == "" {
		c.Subject = "dlq." + c.Stream + ".{stream}.{consumer}"
	}
	if c.Duplicates == 0 {
		c.Duplicates = defaultDuplicates
	}
	if c.Replicas == 0 {
		c.Replicas = 1
	}
	return c
}

// newStream is the configuration of a new stream. c must have its defaults.
func (c DLQConfig) newStream() jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name: c.Stream, Subjects: []string{wildcard(c.Subject)},
		Replicas: c.Replicas, Duplicates: c.Duplicates, Discard: jetstream.DiscardNew, Description: "dead letters of stormguard",
	}
}

// Validate reports all wrong fields in one error.
func (c DLQConfig) Validate() error {
	d := c.withDefaults()
	var errs []error
	add := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("nats: DLQConfig."+format, args...))
	}
	if d.Stream == "" || strings.ContainsAny(d.Stream, " .*>\t\r\n/\\") {
		add("Stream: %q is not the name of a stream", c.Stream)
	}
	if s := wildcard(d.Subject); s == "" || strings.ContainsAny(s, " >{}\t\r\n") || strings.Trim(s, "*.") == "" ||
		strings.HasPrefix(s, ".") || strings.HasSuffix(s, ".") || strings.Contains(s, "..") {
		add("Subject: %q is not a subject with a literal token, {stream} and {consumer}", c.Subject)
	}
	if err := d.Dialect.Validate(); err != nil {
		add("Dialect: %w", err)
	} else if d.Dialect == dlq.Spring {
		add("Dialect: spring is binary, which NATS headers cannot carry; want stormguard or connect")
	}
	if d.Duplicates < minDuplicates {
		add("Duplicates: %s is not at least %s", c.Duplicates, minDuplicates)
	}
	if d.Replicas < 1 || d.Replicas > 5 {
		add("Replicas: %d is not within 1 and 5", c.Replicas)
	}
	return errors.Join(errs...)
}

var placeholders = strings.NewReplacer("{stream}", "*", "{consumer}", "*")

// wildcard is the subject that matches every dead letter of a template.
func wildcard(subject string) string { return placeholders.Replace(subject) }

// DLQ writes dead letters to a stream. It is a [dlq.Writer], and safe for concurrent use.
// Each write costs a round trip, and returns nil after the stream has acknowledged it. While
// the connection is down, a write waits. The server's sync_interval decides how durable a
// write is: by default an acknowledged write survives a kill, but not a loss of power.
//
// A dead letter has the body and headers of the message and the headers of the dialect. It
// has no Nats-* headers of the message, since JetStream would obey them. If nats.go does not
// send a header's name, the letter has "kept-" and the name, with %XX for each byte that is
// not allowed.
//
// Its Nats-Msg-Id is the [dlq.Record.ID] and the time of the message in its stream. The time
// is needed since sequences are not unique: a stream that was deleted and made again counts
// from 1, and so does a stream of the same name in another domain.
//
// A DLQ logs at WARN, once for each source, that a body was cut; see [DLQ.Write]. It uses the
// logger of the first source or [Mover] that has one, else [slog.Default].
type DLQ struct {
	js   jetstream.JetStream
	cfg  DLQConfig
	cuts *cuts
}

var _ dlq.Writer = (*DLQ)(nil)

// NewDLQ creates the stream of dead letters, or checks the existing one. That stream must take
// the subject, confirm and keep its messages, and recognise twins for at least 2 minutes.
// Otherwise the error is an [ErrUnsuitable] with the command that corrects it.
func NewDLQ(ctx context.Context, js jetstream.JetStream, cfg DLQConfig) (*DLQ, error) {
	if js == nil {
		return nil, errors.New("nats: NewDLQ: the JetStream must not be nil")
	}
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	if _, err := ensureStream(ctx, js, cfg.newStream(), cfg.NoCreate); err != nil {
		return nil, err
	}
	return &DLQ{js: js, cfg: cfg, cuts: new(cuts)}, nil
}

// ensureStream creates a stream, or checks that the existing one of that name is suitable.
func ensureStream(ctx context.Context, js jetstream.JetStream, want jetstream.StreamConfig, noCreate bool) (jetstream.Stream, error) {
	s, err := js.Stream(ctx, want.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		if noCreate {
			return nil, unsuitable("stream %s does not exist: %s", want.Name, addCommand(&want))
		}
		s, err = js.CreateStream(ctx, want)
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // another process was faster
			s, err = js.Stream(ctx, want.Name)
		}
	}
	if other := overlaps(ctx, js, &want, err); other != "" {
		return nil, unsuitable("stream %s: its subjects %q overlap with those of stream %s: choose other subjects, or that stream: %w", want.Name, want.Subjects, other, err)
	}
	if err != nil {
		return nil, fmt.Errorf("nats: stream %s on %q: %w", want.Name, want.Subjects, err)
	}
	c := s.CachedInfo().Config
	var errs []error
	for _, subject := range want.Subjects {
		if !covered(subject, c.Subjects) {
			errs = append(errs, unsuitable("stream %s: does not take %q but %q: nats stream edit %s --subjects %q",
				c.Name, subject, c.Subjects, c.Name, strings.Join(append(c.Subjects, subject), ",")))
		}
	}
	if c.Duplicates < minDuplicates {
		errs = append(errs, unsuitable("stream %s: its duplicate window of %s is not at least %s, so a crash could make twins: nats stream edit %s --dupe-window 10m",
			c.Name, c.Duplicates, minDuplicates, c.Name))
	}
	if c.NoAck {
		errs = append(errs, unsuitable("stream %s: does not acknowledge, so nothing is confirmed: nats stream edit %s --ack", c.Name, c.Name))
	}
	keeps := want.Discard == jetstream.DiscardNew // keeps confirmed messages; nobody confirms an advisory
	if keeps && dropsOldest(&c) {
		errs = append(errs, unsuitable("stream %s: at its limit it drops the oldest, though it was confirmed: nats stream edit %s --discard new", c.Name, c.Name))
	}
	if keeps && dropsOfSubject(&c) {
		errs = append(errs, unsuitable("stream %s: it keeps %d messages of a subject, and drops older ones though they were confirmed: nats stream edit %s --max-msgs-per-subject=-1",
			c.Name, c.MaxMsgsPerSubject, c.Name))
	}
	if c.Retention == jetstream.InterestPolicy {
		errs = append(errs, unsuitable("stream %s: its interest retention drops what nobody reads yet; make another: %s", c.Name, addCommand(&want)))
	}
	return s, errors.Join(errs...)
}

// dropsOldest reports whether a stream at its limit drops an old message for a new one.
func dropsOldest(c *jetstream.StreamConfig) bool {
	return c.Discard == jetstream.DiscardOld && (c.MaxMsgs > 0 || c.MaxBytes > 0)
}

// dropsOfSubject reports whether a stream at the limit of one subject drops an old message of it.
func dropsOfSubject(c *jetstream.StreamConfig) bool {
	return c.MaxMsgsPerSubject > 0 && !(c.Discard == jetstream.DiscardNew && c.DiscardNewPerSubject)
}

// overlaps returns the stream that already has a subject of want; "" if err does not say that
// subjects overlap.
func overlaps(ctx context.Context, js jetstream.JetStream, want *jetstream.StreamConfig, err error) string {
	if api, ok := errors.AsType[*jetstream.APIError](err); !ok || api.ErrorCode != subjectsOverlap {
		return ""
	}
	for _, subject := range want.Subjects {
		if name, err := js.StreamNameBySubject(ctx, subject); err == nil {
			return name
		}
	}
	return ""
}

// addCommand is the command that creates the stream.
func addCommand(c *jetstream.StreamConfig) string {
	retention := "limits"
	if c.Retention == jetstream.WorkQueuePolicy {
		retention = "work"
	}
	return fmt.Sprintf("nats stream add %s --subjects '%s' --storage file --retention %s --replicas %d --dupe-window %s --discard %s --defaults",
		c.Name, strings.Join(c.Subjects, ","), retention, max(1, c.Replicas), c.Duplicates, strings.ToLower(strings.TrimPrefix(c.Discard.String(), "Discard")))
}

// covered reports whether one of the patterns matches everything that subject matches.
func covered(subject string, patterns []string) bool {
	want := strings.Split(subject, ".")
	for _, pattern := range patterns {
		have := strings.Split(pattern, ".")
		for i, token := range have {
			if token == ">" && i < len(want) {
				return true
			}
			if i >= len(want) || token != "*" && token != want[i] {
				break
			}
			if i == len(have)-1 && len(have) == len(want) {
				return true
			}
		}
	}
	return false
}

// headerTrimmed is a header of a dead letter whose body was cut to make room for the headers
// that say why it is dead. Example: "body: 1048000 of 1048576 bytes, 576 cut".
const headerTrimmed = "Dead-Letter-Trimmed"

// Write publishes the dead letter and waits for the stream's answer. A record over the
// server's max_payload or the stream's limit is a [*dlq.TooLargeError]. A subject that no
// stream takes is a [dlq.ErrRefused].
//
// If a message fits by itself, but not with the headers of a trimmed record, Write cuts the
// end of its body: otherwise it could never be written. The header Dead-Letter-Trimmed says
// how much is cut. Only the message's own stream then has the whole body, as long as it keeps
// the message. A work-queue or interest stream drops the message after the ack.
func (d *DLQ) Write(ctx context.Context, r *dlq.Record) error {
	m := d.message(r)
	err := d.publish(ctx, m, letterID(r))
	if large, ok := errors.AsType[*dlq.TooLargeError](err); ok {
		if size := cutBody(m, r, large); size > 0 {
			if err = d.publish(ctx, m, letterID(r)); err == nil {
				d.cuts.warn(&r.Origin, size, size-len(m.Data), d.raise(large))
			}
		}
	}
	return err
}

// letterID is the unique id of a letter. A guard and a [Mover] use the same time of a message,
// and so the same id.
func letterID(r *dlq.Record) string {
	id := r.ID()
	if id == "" || r.Origin.Sequence == 0 || r.Timestamp.IsZero() {
		return id
	}
	return id + "@" + strconv.FormatInt(r.Timestamp.UnixNano(), 10)
}

// raise names the setting to raise so that a whole dead letter fits.
func (d *DLQ) raise(large *dlq.TooLargeError) string {
	if errors.Is(large.Err, nats.ErrMaxPayload) {
		return "max_payload in the server's configuration"
	}
	return "nats stream edit " + d.cfg.Stream + " --max-msg-size"
}

// cutBody cuts the body of a message that is too large only because of the record's headers.
// It returns the length of the body before, or 0 if it cuts nothing. It does not cut if the
// record can still be trimmed, or if the message would not fit by itself: then somebody has
// to raise the limit.
func cutBody(m *nats.Msg, r *dlq.Record, large *dlq.TooLargeError) (size int) {
	least := *r
	least.Trim(0)
	if large.Max <= 0 || least.Size() < r.Size() {
		return 0
	}
	before := &nats.Msg{Data: r.Body, Header: nats.Header{}}
	for _, h := range r.Headers {
		name := headerName(h.Name)
		before.Header[name] = append(before.Header[name], headerText(h.Value))
	}
	size = len(r.Body)
	if was := before.Header.Get(headerTrimmed); was != "" { // a Mover cut the body before
		_, _ = fmt.Sscanf(was, trimmedText, new(int), &size, new(int))
	}
	m.Header.Set(headerTrimmed, fmt.Sprintf(trimmedText, size, size, size)) // the longest possible text
	over := wireSize(m) - large.Max
	if wireSize(before) > large.Max || over <= 0 || over > len(m.Data) {
		return 0
	}
	m.Data = m.Data[:len(m.Data)-over]
	m.Header.Set(headerTrimmed, fmt.Sprintf(trimmedText, len(m.Data), size, size-len(m.Data)))
	return size
}

const trimmedText = "body: %d of %d bytes, %d cut"

// cuts logs that a body was cut, once for each source. It is safe for concurrent use.
type cuts struct {
	log  atomic.Pointer[slog.Logger] // the first logger that was given; nil for none
	said sync.Map                    // sources that were logged
}

// inherit sets the logger, if there is none yet.
func (c *cuts) inherit(log *slog.Logger) { c.log.CompareAndSwap(nil, log) }

func (c *cuts) warn(from *dlq.Origin, size, cut int, raise string) {
	source := from.Source + "/" + from.Group
	if _, before := c.said.LoadOrStore(source, true); before {
		return
	}
	log := c.log.Load()
	if log == nil {
		log = slog.Default()
	}
	log.Warn("the end of a dead letter's body was cut to make room for its headers", "source", source,
		"sequence", from.Sequence, "bytes", size, "cut", cut, "raise", raise,
		"means", "the end is lost once the message's own stream drops it; a work-queue or interest stream does so with the ack")
}

// connected waits until the connection is connected, or closed for good. A letter published
// before would take room in the client's buffer, which acks need. It would also be sent later,
// after the caller was told that it is not written.
func (d *DLQ) connected(ctx context.Context) error {
	conn := d.js.Conn()
	for status := conn.Status(); !conn.IsConnected() && !conn.IsClosed(); status = conn.Status() {
		select {
		case <-time.After(connectedPoll):
		case <-ctx.Done():
			return fmt.Errorf("the connection is %s: %w", status, errors.Join(nats.ErrDisconnected, ctx.Err()))
		}
	}
	return nil
}

// publish writes a dead letter.
func (d *DLQ) publish(ctx context.Context, m *nats.Msg, id string) error {
	opts := []jetstream.PublishOpt{jetstream.WithExpectStream(d.cfg.Stream)}
	publish := func(ctx context.Context) (*jetstream.PubAck, error) { return d.js.PublishMsg(ctx, m, opts...) }
	var err error
	if id == "" { // sent only once, since the server could not recognise a twin
		if err = d.connected(ctx); err == nil {
			_, err = publish(ctx)
		}
	} else {
		// A broken connection loses the letter or the answer without an error, so the letter is
		// sent again. The server recognises it by its id.
		opts = append(opts, jetstream.WithMsgID(id))
		_, err = ask(ctx, func(ctx context.Context) (*jetstream.PubAck, error) {
			if err := d.connected(ctx); err != nil {
				return nil, err
			}
			ack, err := publish(ctx)
			if code, ok := errors.AsType[*jetstream.APIError](err); ok && code.ErrorCode == inProcess {
				<-ctx.Done() // the first write is not finished yet; the next try gets its answer
				return nil, ctx.Err()
			}
			return ack, err
		})
	}
	if err == nil {
		return nil
	}
	size := wireSize(m)
	var api *jetstream.APIError
	switch {
	case errors.Is(err, nats.ErrMaxPayload):
		return &dlq.TooLargeError{Size: size, Max: int(d.js.Conn().MaxPayload()), Err: err}
	case errors.Is(err, jetstream.ErrStreamMessageExceedsMaximum):
		return &dlq.TooLargeError{Size: size, Max: d.streamMax(ctx), Err: err}
	case errors.Is(err, jetstream.ErrNoStreamResponse):
		return fmt.Errorf("%w %s: stream %s is gone, or the server is starting: %w: %w", errNoStream, m.Subject, d.cfg.Stream, dlq.ErrRefused, err)
	case errors.As(err, &api) && (api.ErrorCode == streamMismatch || api.ErrorCode == streamSealed):
		return fmt.Errorf("nats: dead letter to %s: stream %s: %w: %w", m.Subject, d.cfg.Stream, dlq.ErrRefused, err)
	}
	return fmt.Errorf("nats: dead letter to %s: %w", m.Subject, err)
}

// The server's error codes that nats.go has no name for.
const (
	streamMismatch  jetstream.ErrorCode = 10060
	subjectsOverlap jetstream.ErrorCode = 10065
	streamSealed    jetstream.ErrorCode = 10109
	inProcess       jetstream.ErrorCode = 10158 // a message of this id is being written
)

// streamMax is the stream's limit of a message's size, 0 if there is no limit or no answer.
func (d *DLQ) streamMax(ctx context.Context) int {
	s, err := d.js.Stream(ctx, d.cfg.Stream)
	if err != nil {
		return 0
	}
	return int(max(0, s.CachedInfo().Config.MaxMsgSize))
}

// message is the dead letter as NATS carries it.
func (d *DLQ) message(r *dlq.Record) *nats.Msg {
	m := &nats.Msg{Subject: d.subject(r), Data: r.Body, Header: nats.Header{}}
	if r.Key != nil {
		m.Header[keyHeader] = []string{base64.StdEncoding.EncodeToString(r.Key)}
	}
	for _, h := range dlq.Encode(r, d.cfg.Dialect) {
		name := headerName(h.Name)
		m.Header[name] = append(m.Header[name], headerText(h.Value))
	}
	return m
}

// headerName returns a header name that nats.go sends. nats.go reads any name but refuses to
// write some: a letter with such a name could never be written.
func headerName(name string) string {
	bad := func(c byte) bool { return c <= ' ' || c >= 0x7f || strings.IndexByte("\"(),/:;<=>?@[\\]{}", c) >= 0 }
	if name != "" && !strings.ContainsFunc(name, func(r rune) bool { return r >= 0x7f || bad(byte(r)) }) {
		return name
	}
	var b strings.Builder
	b.WriteString("kept-")
	for _, c := range []byte(name) {
		if bad(c) {
			fmt.Fprintf(&b, "%%%02X", c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

// subject fills the template. An unknown part becomes "-".
func (d *DLQ) subject(r *dlq.Record) string {
	token := func(s string) string {
		if s == "" {
			return "-"
		}
		return strings.NewReplacer(".", "_", " ", "_", "*", "_", ">", "_").Replace(s)
	}
	return strings.NewReplacer("{stream}", token(r.Origin.Source), "{consumer}", token(r.Origin.Group)).Replace(d.cfg.Subject)
}

// keyHeader is the header for the key, in base64, of a dead letter from elsewhere, such as a
// held HTTP request: NATS messages have no key.
const keyHeader = "X-Stormguard-Message-Key"

func headerText(v any) string {
	switch v := v.(type) {
	case nil:
		return ""
	case string:
		return v
	case []byte:
		return string(v)
	case time.Time:
		return v.UTC().Format(time.RFC3339Nano)
	}
	return fmt.Sprint(v)
}

// wireSize is the size of headers and body, as the server counts them.
func wireSize(m *nats.Msg) int {
	n := len(m.Data)
	if len(m.Header) > 0 {
		n += len("NATS/1.0\r\n\r\n")
	}
	for name, values := range m.Header {
		for _, v := range values {
			n += len(name) + len(": \r\n") + len(v)
		}
	}
	return n
}

// ReadDeadLetter reads a dead letter of any dialect from a message of a DLQ. If it recognises
// no dialect, the origin is that of the message itself. The record shares the message's body.
// The error joins an error for each header that cannot be read; all other headers are decoded.
func ReadDeadLetter(m jetstream.Msg) (dlq.Record, error) {
	header := maps.Clone(m.Headers())
	var key []byte
	if values := header[keyHeader]; len(values) == 1 {
		if decoded, err := base64.StdEncoding.DecodeString(values[0]); err == nil {
			key = decoded
			delete(header, keyHeader)
		}
	}
	r, dialect, err := dlq.Decode(fromHeader(header))
	r.Key, r.Body = key, m.Data()
	md, mdErr := m.Metadata()
	if mdErr != nil {
		return r, errors.Join(err, fmt.Errorf("nats: dead letter on %s: %w", m.Subject(), mdErr))
	}
	if r.Timestamp.IsZero() {
		r.Timestamp = md.Timestamp
	}
	if dialect == "" {
		r.Origin = dlq.Origin{System: system, Source: md.Stream, Subject: m.Subject(), Group: md.Consumer, Sequence: md.Sequence.Stream}
	}
	return r, err
}
