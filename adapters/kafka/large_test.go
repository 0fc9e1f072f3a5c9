// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// squeezing is a configuration that compresses, of a program that batches besides.
func squeezing() *sarama.Config {
	c := testConfig()
	c.Producer.Compression = sarama.CompressionGZIP
	c.Producer.Flush.Messages, c.Producer.Flush.Frequency = 1000, time.Hour
	return c
}

// large is what compresses to next to nothing.
var large = bytes.Repeat([]byte("x"), 3<<20)

// noise is what does not compress.
func noise(n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(rand.Uint32())
	}
	return out
}

// publishLarge sends large messages of a key, compressed.
func (r *rig) publishLarge(key string, n int) {
	r.t.Helper()
	c := testConfig()
	c.Producer.Compression, c.Producer.MaxMessageBytes, c.Producer.Return.Successes = sarama.CompressionGZIP, 8<<20, true
	p, err := sarama.NewSyncProducer(r.addrs, c)
	if err != nil {
		r.t.Fatal(err)
	}
	for range n {
		if _, _, err := p.SendMessage(&sarama.ProducerMessage{Topic: r.topic, Key: sarama.StringEncoder(key), Value: sarama.ByteEncoder(large)}); err != nil {
			r.t.Fatal(err)
		}
	}
	if err := p.Close(); err != nil {
		r.t.Error(err)
	}
}

// What is too large before compression and not after it is written where the
// configuration compresses; what is too large after it, the broker refuses alone.
func TestCompressedDeadLetters(t *testing.T) {
	t.Parallel()
	r, _ := newFakeRig(t)
	d, err := NewDLQ(r.addrs, squeezing(), DLQConfig{Sources: []string{"orders"}})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	letter := func(n int, body []byte) *dlq.Record {
		l := letterOf("orders", int64(n))
		l.Body = body
		return l
	}
	if err := d.Write(adaptertest.Context(t), letter(1, large)); err != nil {
		t.Fatal(err)
	}
	ms, err := r.read(adaptertest.Context(t), "orders.dlq", 0, 0, 1)
	if err != nil || !bytes.Equal(ms[0].Value, large) {
		t.Errorf("%d messages, %v", len(ms), err)
	}
	var writing sync.WaitGroup
	for i := range 32 {
		writing.Go(func() {
			size := 100
			if i%4 == 0 {
				size = 2 << 20
			}
			err := d.Write(adaptertest.Context(t), letter(i+2, noise(size)))
			if tooLarge := errors.Is(err, dlq.ErrTooLarge); tooLarge != (size > 100) || !tooLarge && err != nil {
				t.Errorf("%d bytes: %v", size, err)
			}
		})
	}
	writing.Wait()
	huge := letter(99, make([]byte, sarama.MaxRequestSize))
	if err := d.Write(adaptertest.Context(t), huge); !errors.Is(err, dlq.ErrTooLarge) {
		t.Errorf("%v", err)
	}

	plain := r.dlq(DLQConfig{Sources: []string{"orders"}})
	if err := plain.Write(adaptertest.Context(t), letter(100, large)); !errors.Is(err, dlq.ErrTooLarge) || !strings.Contains(err.Error(), "Producer.Compression") {
		t.Errorf("%v", err)
	}
}

// A large message is parked where the configuration compresses, and dead-lettered
// where it does not.
func TestParkedMessageThatIsLarge(t *testing.T) {
	t.Parallel()
	for _, compress := range []bool{true, false} {
		r, _ := newFakeRig(t)
		letters, err := NewDLQ(r.addrs, squeezing(), DLQConfig{Sources: []string{"orders"}})
		if err != nil {
			t.Fatal(err)
		}
		defer letters.Close()
		config := testConfig()
		if compress {
			config = squeezing()
		}
		retries, err := NewRetryTopics(r.addrs, config, RetryConfig{Sources: []string{"orders"}, Group: r.group, Delays: []time.Duration{300 * time.Millisecond}})
		if err != nil {
			t.Fatal(err)
		}
		defer retries.Close()
		g := adaptertest.Guard(t, guard.Config{Policy: parking(2)})
		src := func() guard.State { return adaptertest.Source(t, g, "orders/0").State() }
		var well atomic.Int64
		handle := func(_ context.Context, m *sarama.ConsumerMessage) error {
			switch {
			case len(m.Value) < len(large):
			case src().Tally.Parked == 0:
				return errDown
			case bytes.Equal(m.Value, large):
				well.Add(1)
			}
			return nil
		}
		m := r.join(testConfig(), Wrap(g, handle, WithDeadLetters(letters), WithRetryTopics(retries), WithLogger(adaptertest.Log())))
		r.publishLarge("a", 1)
		stop := r.pulse() // others succeed
		adaptertest.Eventually(t, "it is settled", func() bool {
			if compress {
				return well.Load() == 1 && r.parkedLeft() == 0
			}
			return src().Account.DeadLettered == 1
		})
		stop()
		adaptertest.Eventually(t, "all is committed", func() bool { return r.pending() == 0 })
		m.stop()
		if !compress {
			ms, err := r.read(adaptertest.Context(t), "orders.dlq", 0, 0, 1)
			if err != nil || !bytes.Equal(ms[0].Value, large) {
				t.Errorf("%d messages, %v", len(ms), err)
			}
		} else if n := r.end("orders.dlq", 0); n > 0 {
			t.Errorf("%d dead letters", n)
		}
	}
}

// One that is too large to follow has its turn when what it should follow is done.
func TestFollowerThatIsTooLarge(t *testing.T) {
	t.Parallel()
	orders, _ := newFakeRig(t)
	r := orders.parks(time.Second)
	g := adaptertest.Guard(t, guard.Config{Policy: parking(2)})
	r.g = g
	var mu sync.Mutex
	var handled []int64 // offsets; what is not committed may come again
	handle := func(_ context.Context, m *sarama.ConsumerMessage) error {
		if string(m.Key) != "a" {
			return nil
		}
		if len(m.Value) < 10 && r.parked(0) == 0 {
			return errDown
		}
		mu.Lock()
		defer mu.Unlock()
		handled = append(handled, m.Offset)
		return nil
	}
	m := r.join(testConfig(), Wrap(g, handle, WithDeadLetters(r.letters), WithRetryTopics(r.retries), WithLogger(adaptertest.Log())))
	stop := r.pulse()
	r.publish(0, 1, nil, func(int) string { return "a" })
	adaptertest.Eventually(t, "it is parked", func() bool { return r.parked(0) == 1 })
	r.publishLarge("a", 2)
	adaptertest.Eventually(t, "all are handled", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(slices.Compact(slices.Clone(handled))) >= 3
	})
	stop()
	adaptertest.Eventually(t, "all is committed", func() bool { return r.pending() == 0 && r.parkedLeft() == 0 })
	m.stop()
	if !slices.IsSorted(handled) || len(slices.Compact(handled)) != 3 {
		t.Errorf("handled %v", handled)
	}
}

// The limit of a topic may be raised while the process runs, as the log line about a letter
// that is too large says: the letter is written then.
func TestRaisedLimit(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	d, err := NewDLQ(r.addrs, testConfig(), DLQConfig{Sources: []string{r.topic}, Topic: r.topic + ".dlq", Replicas: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		_ = r.admin.DeleteTopic(r.topic + ".dlq")
	})
	rec := &dlq.Record{Body: noise(5 << 20), Timestamp: time.Now(), Origin: dlq.Origin{System: "kafka", Source: r.topic, HasOffset: true, Offset: 1}, Reason: dlq.ReasonPermanent}
	if err := d.Write(adaptertest.Context(t), rec); !errors.Is(err, dlq.ErrTooLarge) {
		t.Fatalf("%v, want ErrTooLarge", err)
	}
	most := "8388608"
	if err := r.admin.AlterConfig(sarama.TopicResource, r.topic+".dlq", map[string]*string{"max.message.bytes": &most}, false); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "it is written", func() bool {
		err = d.Write(adaptertest.Context(t), rec)
		return err == nil
	})
}
