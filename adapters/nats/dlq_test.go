// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

func record() *dlq.Record {
	return &dlq.Record{
		Body:      []byte("body"),
		Headers:   []dlq.Header{{Name: "Traceparent", Value: "00-1"}, {Name: "a", Value: "1"}, {Name: "a", Value: "2"}, {Name: "Nats-Expected-Stream", Value: "X"}},
		Timestamp: time.Unix(1, 5).UTC(),
		Origin:    dlq.Origin{System: "nats", Source: "S", Subject: "s.x", Group: "C", Sequence: 7},
		Attempts:  3, Deliveries: 2, Reason: dlq.ReasonAttempts,
		Error: dlq.ErrorInfo{Type: "T", Message: "two\nlines \x00"},
	}
}

func (r *rig) letters(t testing.TB, stream string) []jetstream.Msg {
	t.Helper()
	ctx := adaptertest.Context(t)
	s, err := r.js.Stream(ctx, stream)
	if err != nil {
		t.Fatal(err)
	}
	c, err := s.CreateConsumer(ctx, jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy, InactiveThreshold: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.DeleteConsumer(ctx, c.CachedInfo().Name) }()
	var out []jetstream.Msg
	for n := c.CachedInfo().NumPending; n > 0; n-- {
		m, err := c.Next()
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, m)
	}
	return out
}

func TestDLQRoundTrip(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	for i, dialect := range []dlq.Dialect{"", dlq.Connect} {
		key := [][]byte{[]byte("\xff\x00k"), {}}[i] // of a message from elsewhere
		stream := "DLQ" + string(dialect)
		d, err := NewDLQ(adaptertest.Context(t), r.js, DLQConfig{Stream: stream, Subject: stream + ".{stream}.{consumer}", Dialect: dialect})
		if err != nil {
			t.Fatal(err)
		}
		want := record()
		want.Key = key
		for range 2 { // the second is the twin that a crash makes
			if err := d.Write(adaptertest.Context(t), want); err != nil {
				t.Fatal(err)
			}
		}
		got := r.letters(t, stream)
		if len(got) != 1 || got[0].Subject() != stream+".S.C" || got[0].Headers().Get("Nats-Msg-Id") != fmt.Sprint(want.ID(), "@", want.Timestamp.UnixNano()) {
			t.Fatalf("%d letters", len(got))
		}
		rec, err := ReadDeadLetter(got[0])
		if err != nil {
			t.Fatal(err)
		}
		if (rec.Key == nil) != (key == nil) || !bytes.Equal(rec.Key, key) {
			t.Errorf("%s: key %q, want %q", dialect, rec.Key, key)
		}
		if rec.ID() != want.ID() || !bytes.Equal(rec.Body, want.Body) || !rec.Timestamp.Equal(want.Timestamp) ||
			rec.Attempts != 3 || rec.Deliveries != 2 || rec.Reason != want.Reason || rec.TraceParent != "00-1" || rec.Origin.Subject != "s.x" {
			t.Errorf("%+v", rec)
		}
		if dialect == "" && rec.Error != want.Error {
			t.Errorf("%+v", rec.Error)
		}
		if fmt.Sprint(rec.Headers) != "[{Traceparent 00-1} {a 1} {a 2}]" {
			t.Errorf("%v", rec.Headers)
		}
	}
}

// Another message of the same number is no twin: its stream was made anew, or is another of
// that name.
func TestLettersOfAnotherStreamAreNoTwins(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	d, err := NewDLQ(adaptertest.Context(t), r.js, DLQConfig{Stream: "D"})
	if err != nil {
		t.Fatal(err)
	}
	first, second := record(), record()
	second.Timestamp, second.Body = first.Timestamp.Add(time.Nanosecond), []byte("another")
	for _, rec := range []*dlq.Record{first, second, first} {
		if err := d.Write(adaptertest.Context(t), rec); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(r.letters(t, "D")); n != 2 {
		t.Errorf("%d letters", n)
	}
}

// A header that nats.go reads and does not send is kept under another name.
func TestLetterWithAHeaderThatIsNotSent(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	d, err := NewDLQ(adaptertest.Context(t), r.js, DLQConfig{Stream: "D"})
	if err != nil {
		t.Fatal(err)
	}
	rec := record()
	for b := range 256 { // whatever a name has
		rec.Headers = append(rec.Headers, dlq.Header{Name: fmt.Sprintf("x%cy%d", byte(b), b), Value: "v" + strconv.Itoa(b)})
	}
	rec.Headers = append(rec.Headers, dlq.Header{Name: "", Value: "none"}, dlq.Header{Name: "trace/id", Value: "7"})
	if err := d.Write(adaptertest.Context(t), rec); err != nil {
		t.Fatal(err)
	}
	h := r.letters(t, "D")[0].Headers()
	values := make(map[string]bool)
	for _, vs := range h {
		for _, v := range vs {
			values[v] = true
		}
	}
	for b := range 256 {
		if !values["v"+strconv.Itoa(b)] {
			t.Errorf("the header with byte %d is lost", b)
		}
	}
	if h.Get("kept-trace%2Fid") != "7" || !values["none"] {
		t.Errorf("%v", h)
	}
}

func TestDLQRefusesWhatWouldLose(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	ctx := adaptertest.Context(t)
	_, err := NewDLQ(ctx, r.js, DLQConfig{Stream: "NONE", NoCreate: true})
	if !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), "nats stream add NONE --subjects 'dlq.NONE.*.*'") {
		t.Error(err)
	}
	for name, c := range map[string]struct {
		cfg  jetstream.StreamConfig
		want string
	}{
		"window":   {jetstream.StreamConfig{Subjects: []string{"dlq.>"}, Duplicates: time.Second}, "--dupe-window"},
		"subject":  {jetstream.StreamConfig{Subjects: []string{"dlq.a.*"}}, "--subjects"},
		"noack":    {jetstream.StreamConfig{Subjects: []string{"dlq.>"}, NoAck: true}, "--ack"},
		"interest": {jetstream.StreamConfig{Subjects: []string{"dlq.>"}, Retention: jetstream.InterestPolicy}, "nats stream add"},
	} {
		c.cfg.Name = "D"
		if _, err := r.js.CreateStream(ctx, c.cfg); err != nil {
			t.Fatal(err)
		}
		if _, err := NewDLQ(ctx, r.js, DLQConfig{Stream: "D"}); !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
		if err := r.js.DeleteStream(ctx, "D"); err != nil {
			t.Fatal(err)
		}
	}
	bad := DLQConfig{Stream: "a.b", Subject: "*.*", Dialect: dlq.Spring, Duplicates: time.Second, Replicas: 9}
	for _, want := range []string{"Stream", "Subject", "Dialect", "Duplicates", "Replicas"} {
		if !strings.Contains(bad.Validate().Error(), "DLQConfig."+want) {
			t.Errorf("%s is not reported: %v", want, bad.Validate())
		}
	}
}

// A dead letter that a broken connection lost is sent again long before its time is over.
func TestDLQLostOnItsWay(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	var sent atomic.Int64
	p := r.lossy(t, func(f frame) bool { return f.subject == "dead" && sent.Add(1) == 1 })
	nc, err := nats.Connect("nats://"+p.l.Addr().String(), nats.Timeout(connectTimeout))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	d, err := NewDLQ(adaptertest.Context(t), js, DLQConfig{Stream: "D", Subject: "dead"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second) // a guard's
	defer cancel()
	for range 2 { // the second is known by its id
		if err := d.Write(ctx, record()); err != nil {
			t.Fatal(err)
		}
	}
	if n, all := sent.Load(), r.letters(t, "D"); n < 3 || len(all) != 1 {
		t.Errorf("sent %d times, %d dead letters", n, len(all))
	}
}

// While the connection is down, no try of a letter takes room in the client's buffer: acks
// need it, and a letter without an ID would be there twice. The letter goes out once the
// server is back.
func TestDLQWaitsForTheConnection(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	d, err := NewDLQ(adaptertest.Context(t), r.js, DLQConfig{Stream: "D"})
	if err != nil {
		t.Fatal(err)
	}
	nameless := record()
	nameless.Origin.Sequence = 0
	if nameless.ID() != "" {
		t.Fatal(nameless.ID())
	}
	records := []*dlq.Record{record(), nameless}
	r.stop()
	adaptertest.Eventually(t, "the client knows of it", func() bool { return !r.nc.IsConnected() })
	before, err := r.nc.Buffered()
	if err != nil {
		t.Fatal(err)
	}
	for _, rec := range records {
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			err := d.Write(ctx, rec)
			cancel()
			if !errors.Is(err, nats.ErrDisconnected) {
				t.Errorf("id %q: %v", rec.ID(), err)
			}
		}
	}
	if n, err := r.nc.Buffered(); err != nil || n != before {
		t.Errorf("%d bytes in the buffer, %d before: %v", n, before, err)
	}
	wrote := make(chan error, len(records))
	ctx := adaptertest.Context(t)
	for _, rec := range records {
		go func() { wrote <- d.Write(ctx, rec) }()
	}
	r.start()
	for range records {
		if err := <-wrote; err != nil {
			t.Error(err)
		}
	}
	if n := len(r.letters(t, "D")); n != len(records) {
		t.Errorf("%d letters of %d", n, len(records))
	}
}

// Two streams of dead letters live beside each other, and one that is in the way of
// another is named.
func TestDLQsDoNotOverlap(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	ctx := adaptertest.Context(t)
	for _, stream := range []string{"ONE", "TWO"} {
		d, err := NewDLQ(ctx, r.js, DLQConfig{Stream: stream})
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Write(ctx, record()); err != nil {
			t.Fatal(err)
		}
		if n := len(r.letters(t, stream)); n != 1 {
			t.Errorf("%d letters in %s", n, stream)
		}
	}
	_, err := NewDLQ(ctx, r.js, DLQConfig{Stream: "THREE", Subject: "dlq.*.{stream}.{consumer}"})
	if !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), "stream ONE") {
		t.Errorf("%v", err)
	}
}

// A message that fits by itself has a dead letter, whatever room it leaves.
func TestDLQTrimsWhatFillsThePayload(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 5 * time.Second})
	r.stop()
	r.payload = 64 << 10
	r.start()
	adaptertest.Eventually(t, "the client knows of it", func() bool { return r.nc.IsConnected() && r.nc.MaxPayload() == int64(r.payload) })
	ctx := adaptertest.Context(t)
	d, err := NewDLQ(ctx, r.js, DLQConfig{Stream: "D"})
	if err != nil {
		t.Fatal(err)
	}
	g, l := logging(t, guard.Config{})
	c := consume(t, g, r.consumer, func(context.Context, jetstream.Msg) error {
		return guard.Permanent(fmt.Errorf("poison: %s", strings.Repeat("x", 2000)))
	}, WithDeadLetters(d))
	most := int(r.payload)
	header := nats.Header{"A": {"1"}}
	type sent struct {
		size   int
		header nats.Header
		cut    bool
	}
	all := []sent{{most - 2000, nil, false}, {most - 1000, nil, false}, {most - 300, nil, true}, {most - 1, nil, true}, {most, nil, true}, {most - len("NATS/1.0\r\nA: 1\r\n\r\n"), header, true}}
	for _, s := range all {
		if err := r.nc.PublishMsg(&nats.Msg{Subject: "s.x", Header: s.header, Data: bytes.Repeat([]byte("b"), s.size)}); err != nil {
			t.Fatal(err)
		}
	}
	adaptertest.Eventually(t, "all dead-lettered", func() bool { return r.info(t).AckFloor.Stream == uint64(len(all)) })
	if err := g.Ready(); err != nil {
		t.Error(err)
	}
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
	told := false
	for i, m := range r.letters(t, "D") {
		rec, err := ReadDeadLetter(m)
		if err != nil {
			t.Error(err)
		}
		if _, cut := dlq.LookupText(rec.Headers, headerTrimmed); cut && !told {
			told = true
			size := all[rec.Origin.Sequence-1].size
			if l.lines("body was cut") != 1 || l.lines("WARN", "source=S/C", fmt.Sprintf("sequence=%d bytes=%d cut=%d", rec.Origin.Sequence, size, size-len(rec.Body)), "max_payload") != 1 {
				t.Errorf("one line a source, with the figures of its first: %s", l)
			}
		}
		s := all[rec.Origin.Sequence-1]
		text, cut := dlq.LookupText(rec.Headers, headerTrimmed)
		if cut != s.cut || rec.Reason != dlq.ReasonPermanent || s.header != nil && m.Headers().Get("A") != "1" {
			t.Errorf("%d: cut %v, %+v", i, cut, rec.Headers)
		}
		if want := fmt.Sprintf("body: %d of %d bytes, %d cut", len(rec.Body), s.size, s.size-len(rec.Body)); cut && text != want || !cut && len(rec.Body) != s.size {
			t.Errorf("%d: %q, want %q", i, text, want)
		}
		if len(rec.Body) < s.size-730 {
			t.Errorf("%d: %d bytes of %d are left", i, len(rec.Body), s.size)
		}
		// Through the Mover a letter is written twice, the second time with longer headers.
		rec.Origin.Subject += strings.Repeat("x", 200)
		rec.Trim(0)
		again := d.message(&rec)
		if large := (&dlq.TooLargeError{Size: wireSize(again), Max: most}); cut && (cutBody(again, &rec, large) != s.size || wireSize(again) > most ||
			again.Header.Get(headerTrimmed) != fmt.Sprintf("body: %d of %d bytes, %d cut", len(again.Data), s.size, s.size-len(again.Data))) {
			t.Errorf("%d: %d bytes, %v", i, wireSize(again), again.Header[headerTrimmed])
		}
	}
}

func TestDLQErrorsSayWhatToDo(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	ctx := adaptertest.Context(t)
	d, err := NewDLQ(ctx, r.js, DLQConfig{Stream: "D"})
	if err != nil {
		t.Fatal(err)
	}
	big := record()
	big.Body = make([]byte, 9<<20)
	var large *dlq.TooLargeError
	if err := d.Write(ctx, big); !errors.As(err, &large) || large.Max != 8<<20 || large.Size <= large.Max {
		t.Errorf("%v", err)
	}
	if _, err := r.js.UpdateStream(ctx, jetstream.StreamConfig{Name: "D", Subjects: []string{"dlq.D.*.*"}, MaxMsgSize: 1200, Duplicates: defaultDuplicates}); err != nil {
		t.Fatal(err)
	}
	long := record()
	long.Error.Stack = strings.Repeat("x", 5000)
	err = d.Write(ctx, long)
	if !errors.As(err, &large) || large.Max != 1200 {
		t.Fatalf("%v", err)
	}
	if !dlq.TrimFor(long, err) || d.Write(ctx, long) != nil {
		t.Error("a trimmed record does not fit")
	}
	if err := r.js.DeleteStream(ctx, "D"); err != nil {
		t.Fatal(err)
	}
	if err := d.Write(ctx, record()); !errors.Is(err, errNoStream) || !errors.Is(err, dlq.ErrRefused) {
		t.Errorf("%v", err)
	}
	if _, err := r.js.CreateStream(ctx, jetstream.StreamConfig{Name: "OTHER", Subjects: []string{"dlq.>"}}); err != nil {
		t.Fatal(err)
	}
	if err := d.Write(ctx, record()); !errors.Is(err, dlq.ErrRefused) {
		t.Errorf("%v", err)
	}
}

// A foreign dead letter is read by its own words, anything else by its place.
func TestReadDeadLetterOfOthers(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	m := nats.NewMsg("s.dead")
	m.Header["reason_poisoned"], m.Header["topic_poisoned"] = []string{"boom"}, []string{"orders"}
	if _, err := r.js.PublishMsg(adaptertest.Context(t), m); err != nil {
		t.Fatal(err)
	}
	r.publish(t, subject, 0, 1)
	got := r.letters(t, "S")
	first, err := ReadDeadLetter(got[0])
	if err != nil || first.Error.Message != "boom" || first.Origin.Source != "orders" {
		t.Errorf("%+v %v", first, err)
	}
	second, err := ReadDeadLetter(got[1])
	if err != nil || second.Origin.Source != "S" || second.Origin.Sequence != 2 || second.Timestamp.IsZero() {
		t.Errorf("%+v %v", second, err)
	}
}

// A crash between the write of a dead letter and the ack of its message makes
// no twin: the next process writes the same ID.
func TestCrashBetweenLetterAndAckMakesNoTwin(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: time.Second})
	d, err := NewDLQ(adaptertest.Context(t), r.js, DLQConfig{Stream: "D"})
	if err != nil {
		t.Fatal(err)
	}
	r.publish(t, subject, 0, 1)
	poison := func(context.Context, jetstream.Msg) error { return guard.Permanent(errDown) }
	nc := r.connect()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	doomed, err := js.Consumer(adaptertest.Context(t), "S", "C")
	if err != nil {
		t.Fatal(err)
	}
	writer := dlq.WriterFunc(func(ctx context.Context, rec *dlq.Record) error {
		defer nc.Close() // the crash: the ack cannot go out
		return d.Write(ctx, rec)
	})
	c := consume(t, adaptertest.Guard(t, guard.Config{}), doomed, poison, WithDeadLetters(&struct{ dlq.Writer }{writer}))
	if err := c.Wait(t); !errors.Is(err, ErrConnectionClosed) {
		t.Fatal(err)
	}
	if i := r.info(t); i.NumAckPending != 1 {
		t.Fatalf("%+v", i)
	}
	c = consume(t, adaptertest.Guard(t, guard.Config{}), r.consumer, poison, WithDeadLetters(d))
	adaptertest.Eventually(t, "settled", func() bool { i := r.info(t); return i.NumAckPending == 0 && i.AckFloor.Stream == 1 })
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
	if n := len(r.letters(t, "D")); n != 1 {
		t.Errorf("%d dead letters", n)
	}
}
