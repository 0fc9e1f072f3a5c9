// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package examples

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var goBlock = regexp.MustCompile("(?s)```go\n(.*?)```")

// imports are the packages that the code of README and docs names, by their names there.
var imports = map[string]string{
	"guardamqp": module + "/adapters/amqp", "guard": module + "/guard", "guardkafka": module + "/adapters/kafka", "guardnats": module + "/adapters/nats",
	"amqp091": "github.com/rabbitmq/amqp091-go", "jetstream": "github.com/nats-io/nats.go/jetstream", "sarama": "github.com/IBM/sarama",
	"context": "context", "errors": "errors", "fmt": "fmt", "log": "log", "nats": "github.com/nats-io/nats.go", "os": "os",
	"signal": "os/signal", "slog": "log/slog", "syscall": "syscall", "time": "time",
}

// The README's quick starts compile as they stand, each with the handler of its broker.
func TestReadmeCompiles(t *testing.T) {
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(read(t, filepath.Join(root, "README.md"))), "\n## Quick start\n")
	text, _, found := strings.Cut(text, "\n## ")
	blocks := goBlock.FindAllStringSubmatch(text, -1)
	if !found || len(blocks) < 4 || !strings.HasPrefix(blocks[0][1], "func handle(") {
		t.Fatalf("%d blocks of code: want the handler, then a consumer for each broker", len(blocks))
	}
	dir := t.TempDir()
	write(t, filepath.Join(dir, "go.mod"), goMod(t, "kafka", root))
	for i, block := range blocks[1:] {
		handler := blocks[0][1]
		for name, message := range map[string]string{"guardamqp": "amqp091.Delivery", "guardnats": "jetstream.Msg"} {
			if strings.Contains(block[1], "return "+name+".Consume(") {
				handler = fmt.Sprintf("func handle(context.Context, %s) error { return nil }\n", message)
			}
		}
		sub := filepath.Join(dir, fmt.Sprint("block", i))
		if err := os.Mkdir(sub, 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(sub, "block.go"), program(handler+"\n"+block[1]))
	}
	build := exec.CommandContext(t.Context(), "go", "build", "./...")
	build.Dir = dir
	build.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOSUMDB=off", "GOWORK=off")
	if out, err := build.CombinedOutput(); err != nil {
		t.Errorf("go build: %v\n%s", err, out)
	}
}

// program is code with the imports that it needs.
func program(code string) []byte {
	var b strings.Builder
	b.WriteString("package quickstart\n\n")
	for name, path := range imports {
		if regexp.MustCompile(`\b` + name + `\.[A-Z]`).MatchString(code) {
			fmt.Fprintf(&b, "import %s %q\n", name, path)
		}
	}
	b.WriteString("\n" + code)
	if strings.Contains(code, "charge(") {
		b.WriteString("\nfunc charge(context.Context, []byte) error { return nil }\n")
	}
	return []byte(b.String())
}
