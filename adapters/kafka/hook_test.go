// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// A wrapped handler's Setup seeks: by ResetOffset backwards, by MarkOffset forwards.
func TestSetupOfAWrappedHandlerSeeks(t *testing.T) {
	t.Parallel()
	for _, to := range []int64{4, 8} {
		t.Run(strconv.FormatInt(to, 10), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, 1)
			r.publish(0, 6, nil, nil)
			first := r.join(testConfig(), Wrap(adaptertest.Guard(t, guard.Config{}), nothing))
			adaptertest.Eventually(t, "all committed", func() bool { return r.committed(0) == 6 })
			first.stop()
			r.publish(6, 10, nil, nil)

			var mu sync.Mutex
			var seen []int64
			h := seekingHandler{rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
				for m := range c.Messages() {
					mu.Lock()
					seen = append(seen, m.Offset)
					mu.Unlock()
					s.MarkMessage(m, "")
				}
				return nil
			}}, func(s sarama.ConsumerGroupSession) {
				s.ResetOffset(r.topic, 0, to, "")
				s.MarkOffset(r.topic, 0, to, "")
			}}
			m := r.join(testConfig(), WrapHandler(adaptertest.Guard(t, guard.Config{}), h))
			adaptertest.Eventually(t, "all committed", func() bool { return r.committed(0) == 10 })
			m.stop()
			if len(seen) == 0 || seen[0] != to || len(seen) != int(10-to) {
				t.Errorf("handled %v, want from %d", seen, to)
			}
		})
	}
}

type seekingHandler struct {
	rawHandler

	seek func(sarama.ConsumerGroupSession)
}

func (h seekingHandler) Setup(s sarama.ConsumerGroupSession) error { h.seek(s); return nil }

// Wrap calls a Setup and a Cleanup of the program's, around the claims of a session: a
// Setup may seek, and its error ends the session.
func TestHooksOfTheProgram(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	r.publish(0, 10, nil, nil)
	first := r.join(testConfig(), Wrap(adaptertest.Guard(t, guard.Config{}), nothing))
	adaptertest.Eventually(t, "all committed", func() bool { return r.committed(0) == 10 })
	first.stop()

	var mu sync.Mutex
	var seen []string
	note := func(s string) { mu.Lock(); defer mu.Unlock(); seen = append(seen, s) }
	m := r.join(testConfig(), Wrap(adaptertest.Guard(t, guard.Config{}), func(_ context.Context, m *sarama.ConsumerMessage) error {
		note(string(m.Value))
		return nil
	}, WithSetup(func(s sarama.ConsumerGroupSession) error {
		note("setup")
		s.ResetOffset(r.topic, 0, 8, "")
		return nil
	}), WithCleanup(func(sarama.ConsumerGroupSession) error { note("cleanup"); return nil })))
	adaptertest.Eventually(t, "handled again", func() bool { mu.Lock(); defer mu.Unlock(); return len(seen) == 3 })
	m.stop()
	if want := []string{"setup", "8", "9", "cleanup"}; !slices.Equal(seen, want) {
		t.Errorf("%v, want %v", seen, want)
	}

	group, err := sarama.NewConsumerGroup(r.addrs, r.group, testConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	refuses := WithSetup(func(sarama.ConsumerGroupSession) error { return errDown })
	if err := group.Consume(ctx, []string{r.topic}, Wrap(adaptertest.Guard(t, guard.Config{}), nothing, refuses)); !errors.Is(err, errDown) {
		t.Errorf("%v", err)
	}
	if err := CheckHandler(adaptertest.Guard(t, guard.Config{}), testConfig(), refuses); !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), "WithSetup") {
		t.Errorf("%v", err)
	}
}
